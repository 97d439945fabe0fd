# What `cmake --install` puts where: headers, libraries, command line, package files for find_package and pkg-config,
# providers, a pack of compiled GPU kernels, documents. The tree may be moved afterwards.
include(CMakePackageConfigHelpers)

set(libraries fattn)
if(NOT SKBUILD)  # a wheel has the shared library only
  list(APPEND libraries fattn_static)
endif()
install(TARGETS ${libraries} EXPORT fattnTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fattn)
install(EXPORT fattnTargets NAMESPACE fattn:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fattnConfig.cmake.in ${PROJECT_BINARY_DIR}/package/fattnConfig.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/fattnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/fattnConfig.cmake ${PROJECT_BINARY_DIR}/package/fattnConfigVersion.cmake
        DESTINATION ${package_dir})

# pkg-config finds the prefix from its own place; how far up that is depends on the library directory (lib, lib/x86_64-linux-gnu).
file(RELATIVE_PATH FATTN_PC_TO_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/fattn.pc.in ${PROJECT_BINARY_DIR}/package/fattn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/fattn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET fattn_cli AND NOT FATTN_SANITIZE)
  install(TARGETS fattn_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(TARGETS fattn_profile LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/providers DESTINATION ${CMAKE_INSTALL_DATADIR}/fattn
          USE_SOURCE_PERMISSIONS PATTERN "__pycache__" EXCLUDE)
endif()

# The Python package: this tree and the operators below the folder of the Python files.
if(SKBUILD)
  install(TARGETS fattn_torch LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

# The pack is made by the command line, which must run here.
if(FATTN_PACK)
  if(NOT TARGET fattn_cli OR FATTN_SANITIZE OR CMAKE_CROSSCOMPILING)
    message(FATAL_ERROR "FATTN_PACK=ON needs FATTN_BUILD_CLI, and a command line that runs on this machine")
  endif()
  install(CODE "set(fattn_cli \"$<TARGET_FILE:fattn_cli>\")
set(fattn_pack_dir \"${CMAKE_INSTALL_LIBDIR}/fattn\")
set(fattn_build_dir \"${PROJECT_BINARY_DIR}\")")
  install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_pack.cmake)
endif()

install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/README.zh-TW.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
              ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs FILES_MATCHING PATTERN "*.md" PATTERN "*.json")
