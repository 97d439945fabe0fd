# FATTN_OLD_GLIBC: what is linked here runs with glibc 2.17 and later, whatever this machine has. The C++ library goes in, and of glibc the oldest
# version of each function is taken (old_glibc.c). Only links differ, so the objects are those of other builds.
add_library(fattn_old_glibc OBJECT ${CMAKE_CURRENT_LIST_DIR}/old_glibc.c)
add_library(fattn_old_glibc_start OBJECT ${CMAKE_CURRENT_LIST_DIR}/old_glibc_start.c)

foreach(target fattn fattn_cli fattn_profile fattn_torch)
  if(TARGET ${target})
    # libdl and libpthread are parts of libc since 2.34, and must be named for what is older.
    target_link_options(${target} PRIVATE -static-libstdc++ LINKER:--exclude-libs,ALL
                        LINKER:--push-state,--no-as-needed,-l:libdl.so.2,-l:libpthread.so.0,--pop-state)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:fattn_old_glibc>)
  endif()
endforeach()
if(TARGET fattn_cli)
  target_sources(fattn_cli PRIVATE $<TARGET_OBJECTS:fattn_old_glibc_start>)
endif()
