// Nothing: the unit that the tests' precompiled headers belong to (tests/CMakeLists.txt).
