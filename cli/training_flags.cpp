#include "cli/training_flags.h"

#include <CLI/CLI.hpp>
#include <limits>

#include "cli/gpt2.h"
#include "cli/gpt2_model.h"
#include "cli/values.h"
#include "gpt2/config.h"

namespace fattn::cli {
namespace {

constexpr int64_t kMostSteps = int64_t{1} << 40;

void add_model(CLI::App& command, TrainingFlags& f) {
  command.option_defaults()->group("Model");
  command.add_option("--model,MODEL", f.model, "A model's folder, whose weights are trained on, or a config.json, of which random weights are made")
      ->type_name("PATH");
  command.add_option("--preset", f.preset, "Random weights of this size")->transform(one_of(gpt2::preset_names()))->type_name("NAME");
  command.add_option("--n-layer", f.n_layer, "Random weights with so many layers [of the preset]")->check(whole_number(1, 4096))->type_name("N");
  command.add_option("--n-head", f.n_head, "Heads [of the preset]")->check(whole_number(1, 65536))->type_name("N");
  command.add_option("--n-embd", f.n_embd, "Width [of the preset]")->check(whole_number(1, 1 << 20))->type_name("N");
  command.add_option("--n-kv-head", f.n_kv_head, "Heads of k and v; fewer: GQA [all heads]")->check(whole_number(1, 65536))->type_name("N");
  command.add_option("--n-positions", f.n_positions, "Tokens that the model takes at once [seqlen, at least the preset's]")
      ->check(whole_number(1))
      ->type_name("N");
  command.add_option("--positions", f.positions, "Added to the embedding, or turning q and k")
      ->transform(one_of({"learned", "rotary"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--tokenizer", f.tokenizer, "Its folder or file, copied into checkpoints [the model's, or that of the data]")->type_name("PATH");
  command.add_option("--seed", f.options.seed, "Of random weights, the order of data and dropout")
      ->check(whole_number(0, std::numeric_limits<int64_t>::max()))
      ->type_name("N")
      ->capture_default_str();
}

void add_data(CLI::App& command, TrainingFlags& f) {
  command.option_defaults()->group("Data");
  command.add_option("--data", f.data, "Token files, or folders of them, as fattn gpt2 tokenize makes")->type_name("PATH");
  command.add_option("--validation", f.validation, "The same, for --eval-every [those that tokenize put beside the data]")->type_name("PATH");
  command.add_option("--batch", f.options.sequences, "Sequences at once")->check(whole_number(1, 1 << 20))->type_name("N")->capture_default_str();
  command.add_option("--seqlen", f.options.seqlen, "Tokens of a sequence")->check(whole_number(1, 1 << 24))->type_name("N")->capture_default_str();
  command.add_option("--accumulate", f.options.accumulate, "Batches for each update of the weights, of all processes together [one of each]")
      ->check(whole_number(1, 1 << 20))
      ->type_name("N");
  command.add_flag("--shuffle,!--no-shuffle", f.options.shuffle, "Rows of data in an order that the seed says; or as they are [shuffled]");
}

void add_learning(CLI::App& command, TrainingFlags& f) {
  command.option_defaults()->group("Learning");
  command.add_option("--steps", f.steps, "Updates of the weights [by epochs]")->check(whole_number(1, kMostSteps))->type_name("N");
  command.add_option("--epochs", f.epochs, "Passes over the data, also in part")->check(number(1e-6, 1e6))->type_name("X")->capture_default_str();
  command.add_option("--learning-rate", f.options.schedule.peak, "The highest")->check(number(0))->type_name("X")->capture_default_str();
  command.add_option("--schedule", f.schedule, "How it falls after the warm-up")
      ->transform(one_of({"cosine", "linear", "constant"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--warmup", f.options.schedule.warmup, "Steps in which it rises [a twentieth of all, at most 2,000]")
      ->check(whole_number(0, kMostSteps))
      ->type_name("N");
  command.add_option("--floor", f.options.schedule.floor, "The last learning rate as a share of the highest")
      ->check(number(0, 1))
      ->type_name("X")
      ->capture_default_str();
  command.add_option("--weight-decay", f.options.weight_decay, "Of matrices and embeddings")->check(number(0))->type_name("X")->capture_default_str();
  command.add_option("--clip", f.options.clip, "The largest norm of all gradients together; 0: any")
      ->check(number(0))
      ->type_name("X")
      ->capture_default_str();
  command.add_option("--beta1", f.options.beta1, "Of AdamW's first moment")->check(number(0, 0.999999))->type_name("X")->capture_default_str();
  command.add_option("--beta2", f.options.beta2, "Of its second moment")->check(number(0, 0.9999999))->type_name("X")->capture_default_str();
  command.add_option("--epsilon", f.options.epsilon, "Of AdamW")->check(number(1e-20, 1))->type_name("X")->capture_default_str();
  command.add_option("--dropout", f.options.dropout, "Share that is dropped, of embeddings, attention and the residual stream")
      ->check(number(0, 0.99))
      ->type_name("X")
      ->capture_default_str();
}

void add_how(CLI::App& command, TrainingFlags& f) {
  command.option_defaults()->group("How");
  command.add_option("--dtype", f.dtype, "Of weights in products and of activations; masters, moments, gradients and sums are fp32")
      ->transform(one_dtype_of({"fp32", "fp16", "bf16"}))
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("--algorithm", f.options.algorithm, "Of attention")
      ->transform(one_of({"auto", "standard", "v1", "v2", "v3"}))
      ->type_name("NAME")
      ->capture_default_str();
  add_gpt2_device(command, f.options.device);
  add_gpt2_threads(command, f.threads);
  command.add_flag("--checkpoint-activations", f.options.checkpoint_activations,
                   "Compute a layer's activations again in the backward pass: less memory");
  command.add_flag("--deterministic", f.options.deterministic,
                   "The same bits on every run, whatever that costs; attention on a GPU has others without it (on the CPU always the same)");
  command.add_option("--memory-limit", f.memory_limit, "Refuse what needs more than this, e.g. 16GiB; 0: what is available")
      ->transform(byte_size(0, "0 or more"))
      ->type_name("SIZE");
  command.add_flag("--memory", f.memory, "Print the memory that it would take, and end");
}

void add_kept(CLI::App& command, TrainingFlags& f) {
  command.option_defaults()->group("Checkpoints");
  command.add_option("--out", f.out, "The run's folder: checkpoints, log.jsonl, loss.svg; new or empty")->type_name("DIR");
  command.add_flag("--resume", f.resume, "Go on from the last checkpoint in it, with the run's own options");
  command.add_option("--every", f.every, "Steps from a checkpoint to the next")
      ->check(whole_number(1, kMostSteps))
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--keep", f.keep, "Checkpoints that are kept; 0: all")->check(whole_number(0, 1 << 20))->type_name("N")->capture_default_str();
  command.add_option("--eval-every", f.eval_every, "Steps from a look at the validation data to the next [as --every]")
      ->check(whole_number(1, kMostSteps))
      ->type_name("N");
  command.add_option("--eval-batches", f.eval_batches, "Of a look; 0: all")
      ->check(whole_number(0, kMostSteps))
      ->type_name("N")
      ->capture_default_str();
  command.option_defaults()->group("Output");
  command.add_option("--figure", f.figure, "Draw the loss here too, as SVG")->check(svg_name())->type_name("FILE.svg");
  command
      .add_option("--track-precision", f.track,
                  "Look at every tensor of every step, and write a line of JSON for each that its dtype does not hold; slower")
      ->type_name("FILE");
  command.add_option("--tensorboard", f.tensorboard, "Write event files for TensorBoard")->type_name("DIR");
  command.add_option("--status", f.status, "Say in this file what is being done; fattn watch shows it [status.json in the run's folder]")
      ->type_name("FILE");
}

}  // namespace

void TrainingFlags::add_to(CLI::App& command) {
  command_ = &command;
  options.device = "cpu";
  add_model(command, *this);
  add_data(command, *this);
  add_learning(command, *this);
  add_how(command, *this);
  add_kept(command, *this);
  group.add_to(command);
  command.option_defaults()->group("Options");
  add_gpt2_json(command, json);
  output.add_to(command);
}

bool TrainingFlags::given(const std::string& flag) const { return command_->count(flag) > 0; }

gpt2::TrainOptions TrainingFlags::chosen(int data_ranks) const {
  gpt2::TrainOptions all = options;
  if (!given("--accumulate")) all.accumulate = data_ranks;
  all.dtype = gpt2_dtype(dtype);
  all.schedule.curve = gpt2::curve_named(schedule);
  return all;
}

}  // namespace fattn::cli
