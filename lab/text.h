// Text from outside (names of devices, of providers, of files) on its way into SVG and HTML.
#pragma once

#include <string>
#include <string_view>

namespace fattn::lab {

// `text` with & < > " ' as entities and control characters as U+FFFD: safe as text and in quoted attributes of XML and HTML.
// Bytes that are no UTF-8 become U+FFFD too.
std::string escape_xml(std::string_view text);

}  // namespace fattn::lab
