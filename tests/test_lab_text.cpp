// Text from outside in SVG and HTML.
#include <gtest/gtest.h>

#include "lab/text.h"

namespace fattn::lab {
namespace {

TEST(LabTextSmall, NothingEndsAnElementOrAnAttribute) {
  EXPECT_EQ(escape_xml("<script>alert(\"1\" + '2') && 3</script>"), "&lt;script&gt;alert(&quot;1&quot; + &#39;2&#39;) &amp;&amp; 3&lt;/script&gt;");
}

TEST(LabTextSmall, WhatIsText) {
  EXPECT_EQ(escape_xml("序列長度 1024\nNVIDIA H100\t80GB é"), "序列長度 1024\nNVIDIA H100\t80GB é");
  EXPECT_EQ(escape_xml("\xF0\x9F\x99\x82"), "\xF0\x9F\x99\x82");
}

TEST(LabTextSmall, WhatIsNotUtf8) {
  const std::string unknown = "\xEF\xBF\xBD";
  EXPECT_EQ(escape_xml(std::string("a\0b", 3)), "a" + unknown + "b");
  EXPECT_EQ(escape_xml("a\x1B[31mb"), "a" + unknown + "[31mb");
  EXPECT_EQ(escape_xml("\xFF"), unknown);
  EXPECT_EQ(escape_xml("\xC0\xBC"), unknown + unknown);                // an overlong "<"
  EXPECT_EQ(escape_xml("\xE5\xBA"), unknown + unknown);                // cut off
  EXPECT_EQ(escape_xml("\xED\xA0\x80"), unknown + unknown + unknown);  // a surrogate
}

}  // namespace
}  // namespace fattn::lab
