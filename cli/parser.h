// The names of the parser's classes, for headers. Who calls one includes <CLI/CLI.hpp>, which takes seconds to compile.
#pragma once

namespace CLI {
class App;
class Option;
class ParseError;
class Validator;
}  // namespace CLI
