# What `cmake --install` puts where: headers, library, command line, package files for find_package and pkg-config,
# providers, a pack of compiled GPU kernels, documents. The tree may be moved afterwards.
include(CMakePackageConfigHelpers)

install(TARGETS fattn EXPORT fattnTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
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

if(TARGET fattn_cli)
  install(TARGETS fattn_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/providers DESTINATION ${CMAKE_INSTALL_DATADIR}/fattn
          USE_SOURCE_PERMISSIONS PATTERN "__pycache__" EXCLUDE)
endif()

# The Python package: this tree and the operators below the folder of the Python files.
if(SKBUILD)
  install(TARGETS fattn_torch LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

# The pack is made by the command line, which must run here.
if(NOT FATTN_PACK STREQUAL OFF)
  if(TARGET fattn_cli AND NOT CMAKE_CROSSCOMPILING)
    install(CODE "set(fattn_pack ${FATTN_PACK})
set(fattn_cli \"$<TARGET_FILE:fattn_cli>\")
set(fattn_pack_dir \"${CMAKE_INSTALL_LIBDIR}/fattn\")
set(fattn_build_dir \"${PROJECT_BINARY_DIR}\")")
    install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_pack.cmake)
  elseif(FATTN_PACK STREQUAL ON)
    message(FATAL_ERROR "FATTN_PACK=ON needs FATTN_BUILD_CLI, and a command line that runs on this machine")
  else()
    message(STATUS "fattn: no pack of kernels will be installed (FATTN_PACK=AUTO): it needs FATTN_BUILD_CLI, and a command line that runs here")
  endif()
endif()

install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/README.zh-TW.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md
              ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs FILES_MATCHING PATTERN "*.md" PATTERN "*.json")
