// GPT-2 in a program of one's own: a model's folder and a prompt in, its text out. Linked with fattn_gpt2, which is in the source tree:
//   add_subdirectory(fattn)
//   target_link_libraries(app PRIVATE fattn_gpt2)
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "gpt2/generate/generate.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s MODEL PROMPT\n", argv[0]);
    return 2;
  }
  try {
    using namespace fattn::gpt2;
    const Tokenizer tokenizer = Tokenizer::load(argv[1]);
    const Model model = Model::load(argv[1]);
    check_fits(tokenizer, model.config());

    SessionOptions size;
    size.batch = 1;
    Session session(model, size);
    GenerateOptions options;
    options.max_new_tokens = 20;
    options.temperature = 0.8;
    options.top_p = 0.95;
    options.seed = 1;
    GenerateCalls calls;
    calls.text = [](size_t, std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); };
    const std::vector<Generated> texts = generate(model, session, &tokenizer, {Encoder(tokenizer).encode(argv[2])}, options, calls);
    std::printf("\n%zu tokens, ended by %s\n", texts[0].tokens.size(), texts[0].ended);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
