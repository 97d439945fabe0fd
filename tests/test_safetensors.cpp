// Safetensors files: what the writer writes the reader reads, and every way to break the format has its clear error.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "files/printable.h"
#include "files/safetensors/reader.h"
#include "files/safetensors/writer.h"
#include "temporary_folder.h"

namespace fattn::files::safetensors {
namespace {

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }

  // A file with this text as its header and this many zero bytes of data.
  std::string file(const std::string& json, size_t data_bytes = 0) const { return raw(length(json.size()) + json + std::string(data_bytes, '\0')); }
  std::string raw(const std::string& content) const {
    const std::string name = path("file.safetensors");
    std::ofstream(name, std::ios::binary) << content;
    return name;
  }
  static std::string length(uint64_t n) {
    std::string text(8, '\0');
    for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(n >> (8 * i) & 255);
    return text;
  }
  int entries() const { return static_cast<int>(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator())); }

  test::TemporaryFolder folder_;
};

// The message of the error, or "" if the file was accepted.
std::string error_of(const std::string& path) {
  try {
    const Reader reader(path);
    for (const TensorEntry& tensor : reader.header().tensors) reader.read(tensor);
    return "";
  } catch (const FormatError& error) {
    return error.what();
  }
}

#define EXPECT_REFUSED(file, part)                                          \
  do {                                                                      \
    const std::string message = error_of(file);                             \
    EXPECT_NE(message.find(part), std::string::npos) << "got: " << message; \
  } while (false)

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST_F(Safetensors, WriterAndReaderAgree) {
  const float wide[6] = {1, -2, 3.5f, 0, 1e-40f, 7};
  const uint16_t narrow[3] = {0x3f80, 0xff80, 0x7fc1};
  const double one = 0.1;
  WholeFile out(path("a"));
  write(out, {{"n", "BF16", {3}, narrow}, {"w", "F32", {2, 3}, wide}, {"s", "F64", {}, &one}, {"e", "F16", {4, 0}, nullptr}}, {{"k", "v\n\"x"}});
  const Reader in(path("a"));
  EXPECT_EQ(in.header().metadata.at("k"), "v\n\"x");
  ASSERT_EQ(in.header().tensors.size(), 4u);
  EXPECT_EQ(in.find("w")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(in.read(*in.find("w")).get(), wide, sizeof wide), 0);
  EXPECT_EQ(std::memcmp(in.read(*in.find("n")).get(), narrow, sizeof narrow), 0);
  EXPECT_EQ(std::memcmp(in.read(*in.find("s")).get(), &one, sizeof one), 0);
  EXPECT_EQ(in.find("e")->begin, in.find("e")->end);
  EXPECT_EQ(in.find("nothing"), nullptr);
  EXPECT_EQ(entries(), 1);  // no temporary file is left
}

TEST_F(Safetensors, ReadsDataThatIsMisalignedInTheFile) {
  // 3 bytes of U8 before the F32: its data lies at an odd address of the file.
  const std::string json = R"({"a":)" + tensor("U8", "[3]", "[0,3]") + R"(,"f":)" + tensor("F32", "[1]", "[3,7]") + "}";
  const float value = 42.5f;
  std::string data = "abc" + std::string(4, '\0');
  std::memcpy(data.data() + 3, &value, 4);
  const Reader in(raw(length(json.size()) + json + data));
  const Bytes bytes = in.read(*in.find("f"));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.get()) % 64, 0u);
  EXPECT_EQ(*reinterpret_cast<const float*>(bytes.get()), value);
}

TEST_F(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(error_of(file("{}")), "");
  EXPECT_EQ(error_of(file("{}      ")), "");  // padding
  EXPECT_EQ(error_of(file(R"({"__metadata__":{}})")), "");
  EXPECT_EQ(error_of(file(R"({"b":)" + tensor("F32", "[1]", "[4,8]") + R"(,"a":)" + tensor("F32", "[1]", "[0,4]") + "}", 8)), "");  // any order
  EXPECT_EQ(error_of(file(R"({"f4":)" + tensor("F4", "[3,2]", "[0,3]") + "}", 3)), "");
  EXPECT_EQ(error_of(file(R"({"scalar":)" + tensor("I64", "[]", "[0,8]") + "}", 8)), "");
  EXPECT_EQ(error_of(file(R"({"":)" + tensor("BOOL", "[0, 18]", "[0,0]") + "}")), "");
}

TEST_F(Safetensors, RefusesFilesThatAreNone) {
  EXPECT_REFUSED(path("missing"), "No such file");
  EXPECT_REFUSED(folder_.path().string(), "a folder");
  EXPECT_REFUSED("/dev/zero", "no regular file");
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_REFUSED(path("pipe"), "no regular file");  // and does not wait for a writer
  EXPECT_REFUSED(raw(""), "0 bytes");
  EXPECT_REFUSED(raw("1234567"), "7 bytes");
  EXPECT_REFUSED(raw("\x89PNG\r\n\x1a\n0000000000000000"), "claim a header of");
}

TEST_F(Safetensors, RefusesHeaderLengths) {
  EXPECT_REFUSED(raw(length(0)), "claim a header of 0 bytes");
  EXPECT_REFUSED(raw(length(1) + "{"), "claim a header of 1 bytes");
  EXPECT_REFUSED(raw(length(3) + "{}"), "claim a header of 3 bytes");  // cut
  EXPECT_REFUSED(raw(length(UINT64_MAX) + "{}"), "claim a header of 18446744073709551615 bytes");
  EXPECT_REFUSED(raw(length(kMaxHeaderBytes + 1) + "{}"), "claim a header of 100000001 bytes");
  // A file that really is that long, without taking the disk space.
  const std::string sparse = raw(length(kMaxHeaderBytes + 1) + "{}");
  fs::resize_file(sparse, kMaxHeaderBytes + 100);
  EXPECT_REFUSED(sparse, "2 to 100000000 are possible");
}

TEST_F(Safetensors, RefusesJsonThatIsNoHeader) {
  EXPECT_REFUSED(file("[]"), "begin with '{'");
  EXPECT_REFUSED(file(" {}"), "begin with '{'");
  EXPECT_REFUSED(file("\xef\xbb\xbf{}"), "begin with '{'");
  EXPECT_REFUSED(file("{} {}"), "no valid JSON");
  EXPECT_REFUSED(file("{}" + std::string(6, '\0')), "a zero byte");
  EXPECT_REFUSED(file(R"({"a":)"), "no valid JSON");
  EXPECT_REFUSED(file("{\"\xff\":1}"), "no valid JSON");
  EXPECT_REFUSED(file(R"({"a":1})"), "the value of 'a' is a number");
  EXPECT_REFUSED(file(R"({"a":null})"), "the value of 'a' is null");
  EXPECT_REFUSED(file(R"({"a":[]})"), "the value of 'a' is an array");
  EXPECT_REFUSED(file(R"({"a":"F32"})"), "the value of 'a' is text");
  EXPECT_REFUSED(file(R"({"a":{}})"), "lacks dtype");
  EXPECT_REFUSED(file(R"({"a":{"dtype":"F32"}})"), "lacks shape");
  EXPECT_REFUSED(file(R"({"a":{"dtype":"F32","shape":[]}})"), "lacks data_offsets");
  EXPECT_REFUSED(file(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"stride":1}})"), "'stride'");
}

TEST_F(Safetensors, RefusesDeepNestingWithoutFollowingIt) {
  const size_t depth = 5'000'000;
  EXPECT_REFUSED(file(R"({"a":)" + std::string(depth, '[')), "the value of 'a' is an array");
  EXPECT_REFUSED(file(R"({"a":{"shape":[)" + std::string(depth, '[')), "shape of tensor 'a' is or holds an array");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  EXPECT_REFUSED(file(objects), "'a'");
  EXPECT_REFUSED(file(R"({"__metadata__":{"a":{)"), "__metadata__ holds an object");
}

TEST_F(Safetensors, RefusesDuplicates) {
  const std::string empty = tensor("F32", "[0]", "[0,0]");
  EXPECT_REFUSED(file(R"({"a":)" + empty + R"(,"a":)" + empty + "}"), "the key 'a' twice");
  EXPECT_REFUSED(file(R"({"a":)" + empty + R"(,"\u0061":)" + empty + "}"), "the key 'a' twice");
  EXPECT_REFUSED(file(R"({"__metadata__":{},"__metadata__":{}})"), "the key '__metadata__' twice");
  EXPECT_REFUSED(file(R"({"__metadata__":{"x":"1","x":"2"}})"), "the key 'x' twice");
  EXPECT_REFUSED(file(R"({"a":{"dtype":"F32","dtype":"F16"}})"), "the key 'dtype' twice");
}

TEST_F(Safetensors, RefusesMetadataThatIsNoText) {
  EXPECT_REFUSED(file(R"({"__metadata__":1})"), "__metadata__ is a number");
  EXPECT_REFUSED(file(R"({"__metadata__":"x"})"), "__metadata__ is text");
  EXPECT_REFUSED(file(R"({"__metadata__":{"x":1}})"), "its values must be text");
  EXPECT_REFUSED(file(R"({"__metadata__":{"x":null}})"), "its values must be text");
}

TEST_F(Safetensors, RefusesDTypes) {
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F31", "[1]", "[0,4]") + "}", 4), "the dtype 'F31'");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("f32", "[1]", "[0,4]") + "}", 4), "the dtype 'f32'");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("", "[1]", "[0,4]") + "}", 4), "the dtype ''");
  EXPECT_REFUSED(file(R"({"a":{"dtype":32)"), "dtype of tensor 'a' is a number");
  const std::string endless = file(R"({"a":)" + tensor(std::string(100'000, 'F'), "[1]", "[0,4]") + "}", 4);
  EXPECT_REFUSED(endless, "FFF...'");
  EXPECT_LT(error_of(endless).size(), 1000u);
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F\\u001b[2J", "[1]", "[0,4]") + "}", 4), "F\\x1b[2J");  // escaped, not obeyed
}

TEST_F(Safetensors, RefusesShapes) {
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[-1]", "[0,4]") + "}", 4), "the number -1");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[1.0]", "[0,4]") + "}", 4), "the number 1.0");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[1e0]", "[0,4]") + "}", 4), "the number 1e0");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[9223372036854775808]", "[0,4]") + "}", 4), "above 2^63 - 1");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[18446744073709551616]", "[0,4]") + "}", 4), "18446744073709551616");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[4294967296,4294967296]", "[0,0]") + "}"), "more bits than");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[576460752303423488]", "[0,0]") + "}"), "more bits than");  // 2^59 * 32 bits
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", R"("2")", "[0,8]") + "}", 8), "shape of tensor 'a' is or holds text");
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F4", "[3]", "[0,2]") + "}", 2), "fills no whole bytes");
  std::string ones = "1";
  for (size_t i = 0; i < kMaxDimensions; ++i) ones += ",1";
  EXPECT_REFUSED(file(R"({"a":)" + tensor("F32", "[" + ones + "]", "[0,4]") + "}", 4), "more than 64 dimensions");
}

TEST_F(Safetensors, RefusesOffsets) {
  const auto one = [](const char* offsets) { return R"({"a":)" + tensor("F32", "[2]", offsets) + "}"; };
  EXPECT_EQ(error_of(file(one("[0,8]"), 8)), "");
  EXPECT_REFUSED(file(one("[8,0]"), 8), "end before they begin");
  EXPECT_REFUSED(file(one("[0,8]"), 7), "reach beyond the file");  // cut
  EXPECT_REFUSED(file(one("[0,8]"), 9), "the file holds 9 bytes");
  EXPECT_REFUSED(file(one("[4,12]"), 12), "leave a hole");
  EXPECT_REFUSED(file(one("[0,4]"), 4), "F32 with shape [2] needs 8");
  EXPECT_REFUSED(file(one("[0,9]"), 9), "hold 9 bytes");
  EXPECT_REFUSED(file(one("[0]"), 8), "has 1 numbers");
  EXPECT_REFUSED(file(one("[0,8,8]"), 8), "has 3 numbers");
  EXPECT_REFUSED(file(one("[-8,0]"), 8), "the number -8");
  EXPECT_REFUSED(file(one("[0,8.0]"), 8), "the number 8.0");
  EXPECT_REFUSED(file(one("[18446744073709551608,18446744073709551615]"), 8), "reach beyond the file");
  EXPECT_REFUSED(file(one("8"), 8), "data_offsets of tensor 'a' is or holds a number");
  const auto two = [](const char* a, const char* b) { return R"({"a":)" + tensor("F32", "[2]", a) + R"(,"b":)" + tensor("F32", "[2]", b) + "}"; };
  EXPECT_REFUSED(file(two("[0,8]", "[0,8]"), 8), "overlap");
  EXPECT_REFUSED(file(two("[0,8]", "[4,12]"), 12), "overlap");
  EXPECT_REFUSED(file(two("[0,8]", "[12,20]"), 20), "leave a hole");
}

// 2^60 bytes are claimed, 8 are there: refused before anything is allocated.
TEST_F(Safetensors, AllocatesNothingThatTheFileDoesNotHold) {
  EXPECT_REFUSED(file(R"({"a":)" + tensor("U8", "[1152921504606846976]", "[0,1152921504606846976]") + "}", 8), "reach beyond the file");
}

TEST_F(Safetensors, NoticesAFileThatShrinks) {
  const std::string name = file(R"({"a":)" + tensor("F32", "[2]", "[0,8]") + "}", 8);
  const Reader in(name);
  fs::resize_file(name, 20);
  EXPECT_THROW(in.read(*in.find("a")), FormatError);
}

TEST_F(Safetensors, WriterRefusesWhatTheFormatCannotHold) {
  const float x = 1;
  const auto refused = [&](std::vector<TensorData> tensors) {
    WholeFile out(path("w"));
    EXPECT_THROW(write(out, std::move(tensors), {}), std::invalid_argument);
  };
  refused({{"a", "F32", {1}, &x}, {"a", "F32", {1}, &x}});
  refused({{"__metadata__", "F32", {1}, &x}});
  refused({{"a", "F33", {1}, &x}});
  refused({{"a", "F32", {-1}, &x}});
  refused({{"a", "F32", {int64_t{1} << 40, int64_t{1} << 40}, &x}});
  EXPECT_EQ(entries(), 0);  // neither the file nor a temporary one
}

TEST_F(Safetensors, AFileIsReplacedWholeOrNotAtAll) {
  std::ofstream(path("w")) << "old";
  fs::permissions(path("w"), fs::perms::owner_read | fs::perms::owner_write);
  const auto content = [&](const std::string& name) {
    std::ifstream in(path(name));
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  {
    WholeFile out(path("w"));
    out.write("half", 4);
    EXPECT_EQ(entries(), 2);
  }
  EXPECT_EQ(content("w"), "old");
  EXPECT_EQ(entries(), 1);
  fs::create_symlink("w", path("link"));
  {
    WholeFile out(path("link"));
    out.write("new", 3);
    EXPECT_EQ(content("w"), "old");
    out.publish();
  }
  EXPECT_EQ(content("w"), "new");  // the link was followed, and is still one
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(fs::status(path("w")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(entries(), 2);
}

TEST_F(Safetensors, OutputsThatAreNoFilesAreRefused) {
  EXPECT_THROW(WholeFile(""), std::runtime_error);
  EXPECT_THROW(WholeFile("/dev/null"), std::runtime_error);
  EXPECT_THROW(WholeFile(folder_.path().string()), std::runtime_error);
  EXPECT_THROW(WholeFile(path("nowhere/file")), std::runtime_error);
  EXPECT_THROW(WholeFile(path("nothing/")), std::runtime_error);
  EXPECT_NO_THROW(WholeFile(path(std::string(250, 'n'))));  // the temporary name is no longer than allowed
  EXPECT_TRUE(fs::exists("/dev/null"));
  EXPECT_EQ(entries(), 0);
}

TEST(Printable, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(printable("plain text, \xc3\xa9 \xe4\xb8\xad \xf0\x9f\x98\x80"), "plain text, \xc3\xa9 \xe4\xb8\xad \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("a\nb\tc\r"), "a\\nb\\tc\\r");
  EXPECT_EQ(printable("\x1b[31m\x07\x7f"), "\\x1b[31m\\x07\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"), "\\x9b");                // C1 control as UTF-8
  EXPECT_EQ(printable("\xe2\x80\xae"), "\\u202e");          // right-to-left override
  EXPECT_EQ(printable("\xf3\xa0\x81\x81"), "\\U000e0041");  // tag character
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
}

TEST(Printable, EscapesInvalidUtf8) {
  EXPECT_EQ(printable("\x80"), "\\x80");
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(printable("\xe0\x80\x80"), "\\xe0\\x80\\x80");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  EXPECT_EQ(printable("\xe4\xb8"), "\\xe4\\xb8");                    // cut
  EXPECT_EQ(printable("\xff\xfe"), "\\xff\\xfe");
}

TEST(Printable, IsBoundedAndStable) {
  EXPECT_EQ(printable(std::string(100, 'a'), 10), std::string(10, 'a') + "...");
  EXPECT_LE(printable(std::string(1'000'000, '\x01')).size(), kPrintableBytes + 3);
  const std::string once = printable("\x1b[0m \xff \xe2\x80\xae \\");
  EXPECT_EQ(printable(once), once);
}

}  // namespace
}  // namespace fattn::files::safetensors
