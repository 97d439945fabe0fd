#!/usr/bin/env bash
# Installs BUILD (default: build) below a scratch folder, moves the tree, and uses it as strangers would: the command line,
# find_package, pkg-config, C alone, C++. Ends with the line `N passed, N failed`.
set -uo pipefail
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "${1:-$source_dir/build}" && pwd) || exit 2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0

# expect NAME COMMAND...: the command must succeed.
expect() {
  local name=$1
  shift
  if "$@" >"$scratch/log" 2>&1; then
    passed=$((passed + 1))
    echo "ok     $name"
  else
    failed=$((failed + 1))
    echo "FAILED $name: $*"
    sed 's/^/       /' "$scratch/log"
  fi
}
absent() { ! grep -rIl "$@"; }

# Nothing is compiled unless asked for: no NVRTC is looked for.
expect "cmake --install" env FATTN_NVRTC=/nonexistent/libnvrtc.so.13 cmake --install "$build" --prefix "$scratch/first"
if [ "$failed" -gt 0 ]; then
  echo "$passed passed, $failed failed"
  exit 1
fi
mv "$scratch/first" "$scratch/moved"
prefix=$scratch/moved
for file in include/fattn/fattn.h include/fattn/fattn.hpp bin/fattn lib/libfattn.so lib/libfattn_profile.so lib/libfattn.so.0 lib/libfattn.a lib/cmake/fattn/fattnConfig.cmake \
  lib/cmake/fattn/fattnConfigVersion.cmake lib/pkgconfig/fattn.pc share/fattn/providers/README.md share/doc/fattn/README.md share/doc/fattn/LICENSE; do
  expect "installs $file" test -e "$prefix/$file"
done
expect "no path of the build in text files" absent -e "$build" -e "$source_dir" -e "$scratch/first" "$prefix/lib" "$prefix/include"
expect "installs no pack of kernels" test ! -e "$prefix/lib/fattn/kernels.pack"
# With FATTN_PACK=ON: the script that makes the pack, on the kernels that the stub of NVRTC compiles at once, kept apart from any real cache.
stub=$build/tests/libfattn_stub_nvrtc.so
cat >"$scratch/pack.cmake" <<EOF
set(CMAKE_INSTALL_PREFIX "$prefix")
set(fattn_cli "$build/cli/fattn")
set(fattn_pack_dir lib/fattn)
set(fattn_build_dir "$scratch")
include("$source_dir/cmake/install_pack.cmake")
EOF
makes_pack() { env FATTN_NVRTC="$1" FATTN_CACHE_DIR="$scratch/compiled" cmake -P "$scratch/pack.cmake" >"$scratch/pack.log" 2>&1; }
without_compiler() { ! makes_pack /nonexistent/libnvrtc.so.13; }
expect "FATTN_PACK=ON without NVRTC fails" without_compiler
expect "and says why" grep -F "no usable NVRTC" "$scratch/pack.log"
expect "and installs none" test ! -e "$prefix/lib/fattn/kernels.pack"
expect "FATTN_PACK=ON makes a pack" makes_pack "$stub"
expect "and prints a line for each kernel" grep -E "^ *2/[0-9]+ " "$scratch/pack.log"
# The pack is found where it is installed, by a machine that has neither NVRTC nor a cache.
pack=$(readlink -f "$prefix/lib/fattn/kernels.pack")
without_nvrtc() { env FATTN_NVRTC=/nonexistent/libnvrtc.so.13 FATTN_CACHE_DIR="$scratch/empty" "$@"; }
looks_for_pack() { without_nvrtc "$prefix/bin/fattn" cache path --json - | grep -F "\"installed_pack\": \"$pack\""; }
expect "the library looks for the pack there" looks_for_pack
for arch in 75 80 86 89 90 100 120; do
  all_from_pack() { without_nvrtc "$prefix/bin/fattn" cache warm --arch "$arch" >"$scratch/warm" && ! grep -v ' pack$' "$scratch/warm"; }
  expect "kernels for $arch come from the pack" all_from_pack
done
no_pack() { ! without_nvrtc "$prefix/bin/fattn" cache warm --arch 90; }
mv "$pack" "$pack.away"
expect "and from nowhere else" no_pack
mv "$pack.away" "$pack"

expect "bin/fattn --version" "$prefix/bin/fattn" --version
expect "bin/fattn info" "$prefix/bin/fattn" info

expect "find_package: configure" cmake -S "$source_dir/examples" -B "$scratch/examples" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
expect "find_package: build" cmake --build "$scratch/examples"
for example in "$source_dir"/examples/c/*.c "$source_dir"/examples/cpp/*.cpp "$source_dir"/examples/lab/*.cpp; do
  relative=${example#"$source_dir/examples/"}
  expect "find_package: $relative runs" "$scratch/examples/$(echo "$relative" | tr '/.' '__')"
done

# A project without C++ must be able to use the C ABI.
mkdir "$scratch/c_only"
cat >"$scratch/c_only/CMakeLists.txt" <<'EOF'
cmake_minimum_required(VERSION 3.22)
project(c_only LANGUAGES C)
find_package(fattn REQUIRED)
add_executable(c_only main.c)
target_link_libraries(c_only PRIVATE fattn::fattn)
EOF
printf '#include <fattn/fattn.h>\nint main(void) { return fattn_abi_version() == FATTN_ABI_VERSION ? 0 : 1; }\n' >"$scratch/c_only/main.c"
expect "C alone: configure" cmake -S "$scratch/c_only" -B "$scratch/c_only/build" -DCMAKE_PREFIX_PATH="$prefix"
expect "C alone: build" cmake --build "$scratch/c_only/build"
expect "C alone: runs" "$scratch/c_only/build/c_only"
mkdir "$scratch/newer"
sed 's/find_package(fattn/& 99.0/' "$scratch/c_only/CMakeLists.txt" >"$scratch/newer/CMakeLists.txt"
refused() { ! cmake -S "$scratch/newer" -B "$scratch/newer/build" -DCMAKE_PREFIX_PATH="$prefix"; }
expect "find_package refuses version 99" refused

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
expect "pkg-config --exists" pkg-config --exists "fattn >= 0.1"
read -ra flags <<<"$(pkg-config --cflags --libs fattn)"
rpath=-Wl,-rpath,$(pkg-config --variable=libdir fattn)  # as README.md says it
expect "pkg-config: C" gcc -std=c11 "$source_dir/examples/c/forward.c" "${flags[@]}" -lm "$rpath" -o "$scratch/pc_c"
expect "pkg-config: C runs" "$scratch/pc_c"
expect "pkg-config: C++" g++ -std=c++17 "$source_dir/examples/cpp/forward.cpp" "${flags[@]}" "$rpath" -o "$scratch/pc_cpp"
expect "pkg-config: C++ runs" "$scratch/pc_cpp"
read -ra flags <<<"$(pkg-config --static --cflags --libs fattn | sed 's/-lfattn/-l:libfattn.a/')"
expect "pkg-config --static: C" gcc -std=c11 "$source_dir/examples/c/forward.c" "${flags[@]}" -o "$scratch/pc_static"
needs_no_library() { ! ldd "$1" | grep -F libfattn; }
expect "pkg-config --static: C runs" "$scratch/pc_static"
expect "and needs no libfattn.so" needs_no_library "$scratch/pc_static"

# The archive as a target, in C++17.
mkdir "$scratch/static"
cat >"$scratch/static/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.22)
project(one_file LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(fattn REQUIRED)
add_executable(one_file "$source_dir/examples/cpp/forward.cpp")
target_link_libraries(one_file PRIVATE fattn::static)
EOF
expect "fattn::static: configure" cmake -S "$scratch/static" -B "$scratch/static/build" -DCMAKE_PREFIX_PATH="$prefix"
expect "fattn::static: build" cmake --build "$scratch/static/build"
expect "fattn::static: runs" "$scratch/static/build/one_file"
expect "and needs no libfattn.so" needs_no_library "$scratch/static/build/one_file"

# The sources below another project, as FetchContent brings them: its own build type, nothing of ours in its `install`.
mkdir "$scratch/fetched"
cat >"$scratch/fetched/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.22)
project(fetched LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 17)
include(FetchContent)
FetchContent_Declare(fattn SOURCE_DIR "$source_dir")
FetchContent_MakeAvailable(fattn)
add_executable(fetched "$source_dir/examples/cpp/forward.cpp")
target_link_libraries(fetched PRIVATE fattn::fattn)
add_executable(fetched_static "$source_dir/examples/cpp/forward.cpp")
target_link_libraries(fetched_static PRIVATE fattn::static)
install(TARGETS fetched)
EOF
# With the flags of the build, so that ccache has its objects.
expect "FetchContent: configure" cmake -G Ninja -DFATTN_WERROR=ON -S "$scratch/fetched" -B "$scratch/fetched/build"
expect "FetchContent: build" cmake --build "$scratch/fetched/build"
expect "FetchContent: runs" "$scratch/fetched/build/fetched"
expect "FetchContent: the archive runs" "$scratch/fetched/build/fetched_static"
expect "FetchContent: install" cmake --install "$scratch/fetched/build" --prefix "$scratch/fetched/prefix"
only_its_own() { [ "$(find "$scratch/fetched/prefix" -type f | wc -l)" = 1 ]; }
expect "FetchContent: installs nothing of fattn" only_its_own

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
