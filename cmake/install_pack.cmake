# Run by `cmake --install`: compiles the common kernels (kernels/planned.txt) for every architecture that NVRTC knows into the pack file
# that the installed library looks for, so that the machines it goes to need no NVRTC. Set before: fattn_pack (FATTN_PACK), fattn_cli,
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
message(STATUS "Compiling: ${pack} (a minute or two; FATTN_PACK=OFF leaves it out)")
execute_process(COMMAND ${CMAKE_COMMAND} -E env "FATTN_CACHE_DIR=${cache}" "${fattn_cli}" cache pack --output "${pack}"
                RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(status EQUAL 0)
  file(SIZE "${pack}" bytes)
  string(REGEX MATCH "[0-9]+ kernels" kernels "${output}")
  math(EXPR kibibytes "${bytes} / 1024")
  message(STATUS "Installing: ${pack} (${kernels}, ${kibibytes} KiB)")
  list(APPEND CMAKE_INSTALL_MANIFEST_FILES "${folder}/kernels.pack")
elseif(fattn_pack STREQUAL AUTO AND error MATCHES "no usable NVRTC")
  message(STATUS "No pack of kernels is installed (FATTN_PACK=AUTO): ${error}")
else()
  message(FATAL_ERROR "No pack of kernels could be made (FATTN_PACK=${fattn_pack}): ${error}")
endif()
