# Run by `cmake --install` of a build with FATTN_PACK=ON: compiles the common kernels (kernels/planned.txt) for every architecture that NVRTC
# knows into the pack file that the installed library looks for, so that the machines it goes to need no NVRTC. Set before: fattn_cli,
# fattn_pack_dir, fattn_build_dir.
set(folder "${fattn_pack_dir}")
if(NOT IS_ABSOLUTE "${folder}")
  set(folder "${CMAKE_INSTALL_PREFIX}/${folder}")
endif()
set(pack "$ENV{DESTDIR}${folder}/kernels.pack")
# What `make test` has compiled is not compiled again.
set(cache "$ENV{FATTN_CACHE_DIR}")
if(NOT cache)
  set(cache "${fattn_build_dir}/kernel-cache")
endif()
file(MAKE_DIRECTORY "$ENV{DESTDIR}${folder}")
message(STATUS "Compiling: ${pack} (some minutes; FATTN_PACK=OFF leaves it out)")
execute_process(COMMAND ${CMAKE_COMMAND} -E env "FATTN_CACHE_DIR=${cache}" "${fattn_cli}" cache pack --output "${pack}" RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "No pack of kernels could be made (FATTN_PACK=ON); the reason stands above. FATTN_PACK=OFF installs without one.")
endif()
file(SIZE "${pack}" bytes)
math(EXPR kibibytes "${bytes} / 1024")
message(STATUS "Installing: ${pack} (${kibibytes} KiB)")
list(APPEND CMAKE_INSTALL_MANIFEST_FILES "${folder}/kernels.pack")
