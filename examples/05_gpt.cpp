// A small GPT on the characters of any text file, or on its words (Radford et al., "Language models are unsupervised multitask learners",
// 2019): trains, compares itself with a model of pairs, and writes text of its own.
// ctest: --text @data@/../README.md --steps 12 --every 6 --batch 4 --context 16 --width 16 --heads 2 --layers 1 --words 30 --sample 40 --fresh --out gpt_test
#include <cctype>
#include <set>
#include <string_view>
#include <unordered_map>

#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  std::string text, prompt;
  int64_t steps = 2000, every = 200, batch = 32, context = 128, width = 128, heads = 4, layers = 4, words = 0, sample = 400;
  double lr = 1e-3, dropout = 0.1, temperature = 0.8;
  Options() : Run("runs/gpt") {}
};

// A text as numbers: each character that occurs has one, and so do the most frequent words, each with the space before it.
class Vocabulary {
 public:
  Vocabulary(const std::string& text, int64_t words) {
    for (char c : std::set<char>(text.begin(), text.end())) add(std::string(1, c));
    std::unordered_map<std::string_view, int64_t> counts;
    for (size_t at = 0; words > 0 && at < text.size();) {
      std::string_view word = word_at(text, at);
      if (word.size() > 1) ++counts[word];
      at += word.size();
    }
    std::vector<std::pair<int64_t, std::string_view>> order;
    for (auto& [word, count] : counts) order.emplace_back(-count, word);
    std::sort(order.begin(), order.end());
    for (auto& [count, word] : std::span(order).first(std::min(order.size(), static_cast<size_t>(words)))) add(std::string(word));
  }
  int64_t size() const { return static_cast<int64_t>(pieces_.size()); }
  std::vector<int64_t> encode(const std::string& text) const {  // a word without a number, by its characters
    std::vector<int64_t> all;
    for (size_t at = 0; at < text.size();) {
      const std::string word(word_at(text, at));
      at += word.size();
      if (auto found = numbers_.find(word); found != numbers_.end()) {
        all.push_back(found->second);
        continue;
      }
      for (char c : word) {
        auto found = numbers_.find(std::string(1, c));
        const auto byte = static_cast<unsigned char>(c);
        HT_CHECK(found != numbers_.end(), "--prompt: ", std::isprint(byte) ? std::string{'\'', c, '\''} : "byte " + std::to_string(byte),
                 " does not occur in the text");
        all.push_back(found->second);
      }
    }
    return all;
  }
  std::string decode(const Tensor& numbers) const {
    std::string text;
    for (int64_t i : numbers.to_vector<int64_t>()) text += pieces_[static_cast<size_t>(i)];
    return text;
  }

 private:
  // Letters, perhaps behind a space; else the one character there.
  static std::string_view word_at(std::string_view text, size_t at) {
    auto letter = [&](size_t i) { return i < text.size() && std::isalpha(static_cast<unsigned char>(text[i])); };
    size_t end = at + 1;
    while ((text[at] == ' ' || letter(at)) && letter(end)) ++end;
    return text.substr(at, end - at);
  }
  void add(const std::string& piece) {
    numbers_.emplace(piece, size());
    pieces_.push_back(piece);
  }
  std::vector<std::string> pieces_;
  std::unordered_map<std::string, int64_t> numbers_;
};

struct Block : nn::Module {
  Block(int64_t width, int64_t heads, double p)
      : norm1(width), attention(width, heads, {.dropout = p, .batch_first = true}), norm2(width), grow(width, 4 * width), shrink(4 * width, width), dropout(p) {}
  nn::LayerNorm norm1;
  nn::MultiheadAttention attention;
  nn::LayerNorm norm2;
  nn::Linear grow, shrink;
  nn::Dropout dropout;
  HT_FIELDS(norm1, attention, norm2, grow, shrink, dropout)
  Tensor forward(const Tensor& x) override {  // [n, t, width]
    Tensor normed = norm1(x), y = x + dropout(attention(normed, normed, normed, {.causal = true}));
    return y + dropout(shrink(gelu(grow(norm2(y)))));
  }
};

struct Gpt : nn::Module {
  Gpt(int64_t pieces, const Options& o) : tokens(pieces, o.width), positions(o.context, o.width), norm(o.width), head(o.width, pieces, {.bias = false}) {
    for (int64_t i = 0; i < o.layers; ++i) blocks.add(Block(o.width, o.heads, o.dropout));
    for (nn::Embedding* e : {&tokens, &positions}) nn::init::normal_(e->weight, 0, 0.02);
    head.weight.tie(tokens.weight);
  }
  nn::Embedding tokens, positions;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head;
  HT_FIELDS(tokens, positions, blocks, norm, head)
  Tensor forward(const Tensor& x) override {  // [n, t], i64 -> [n, t, pieces]
    Tensor h = tokens(x) + positions.weight.slice(0, 0, x.size(1));
    for (auto& block : blocks) h = block(h);
    return head(norm(h));
  }
};

// Rows of the text from random places, and what comes after each of their pieces.
data::Batch draw(const Tensor& text, int64_t batch, int64_t context) {
  Tensor places = randint(0, text.size(0) - context, {batch, 1}, {.device = text.device()}) + arange(context, {.device = text.device()});
  return {index_select(text, 0, places.flatten()).view({batch, context}), index_select(text, 0, places.flatten() + 1).view({batch, context})};
}

Tensor loss_of(Gpt& net, const data::Batch& b, const amp::AutocastOptions& mixed) {
  amp::Autocast region(mixed);
  return cross_entropy(net(b.x).flatten(0, 1), b.target.flatten());
}

// What pairs alone tell, counted in the training text: a pair counts once more, in parts as frequent as what it ends with.
double bigram_loss(const std::vector<int64_t>& text, const std::vector<int64_t>& test, int64_t pieces) {
  std::unordered_map<int64_t, double> pairs;
  std::vector<double> firsts(static_cast<size_t>(pieces), 1), all(static_cast<size_t>(pieces), 1);
  for (size_t i = 1; i < text.size(); ++i) {
    ++pairs[text[i - 1] * pieces + text[i]];
    ++firsts[static_cast<size_t>(text[i - 1])];
    ++all[static_cast<size_t>(text[i])];
  }
  const double total = static_cast<double>(text.size() - 1) + static_cast<double>(pieces);
  double sum = 0;
  for (size_t i = 1; i < test.size(); ++i) {
    auto pair = pairs.find(test[i - 1] * pieces + test[i]);
    const double count = (pair == pairs.end() ? 0 : pair->second) + all[static_cast<size_t>(test[i])] / total;
    sum -= std::log(count / firsts[static_cast<size_t>(test[i - 1])]);
  }
  return sum / static_cast<double>(test.size() - 1);
}

Tensor write_on(Gpt& net, const Options& o, Tensor text) {
  NoGrad off;
  amp::Autocast region(o.mixed());
  net.eval();
  for (int64_t i = 0; i < o.sample; ++i) {
    Tensor seen = text.slice(0, std::max<int64_t>(0, text.size(0) - o.context), {}).unsqueeze(0);
    Tensor last = net(seen).select(0, 0).select(0, -1).to(DType::f32);
    text = cat({text, multinomial(softmax(last / o.temperature, 0), 1)});
  }
  net.train();
  return text;
}

int run(const Options& o) {  // what the program ends with
  const std::string all = io::read_file(o.text);
  const Vocabulary vocabulary(all, o.words);
  const std::vector<int64_t> numbers = vocabulary.encode(all);
  const auto cut = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() * 9 / 10);
  const std::vector<int64_t> training(numbers.begin(), cut), validation(cut, numbers.end());
  HT_CHECK(static_cast<int64_t>(validation.size()) > o.context + 1, "--text: ", all.size(), " characters, ", numbers.size(), " pieces, are too few for a context of ",
           o.context);
  Device device = o.place();
  manual_seed(o.seed);
  Gpt net(vocabulary.size(), o);
  net.to(device);
  const Tensor prompt = tensor(o.prompt.empty() ? std::vector<int64_t>{numbers[0]} : vocabulary.encode(o.prompt)).to(device);
  Tensor train_text = tensor(training).to(device), test_text = tensor(validation).to(device);
  optim::AdamW opt(net.parameters(), {.lr = o.lr, .beta2 = 0.99, .weight_decay = 0.1});
  optim::CosineAnnealingLR schedule(opt, {.steps = o.steps + 1, .min_lr = o.lr / 10, .warmup = std::min<int64_t>(100, o.steps / 10)});
  amp::GradScaler scaler = o.scaler();
  Tensor total = zeros({}, {.device = device});
  auto step = o.replayed([&](const Tensor& x, const Tensor& target) {
    opt.zero_grad();
    Tensor loss = loss_of(net, {x, target}, o.mixed());
    scaler.scale(loss).backward();
    scaler.unscale_(opt);
    optim::clip_grad_norm_(opt.parameters(), 1.0);
    scaler.step(opt);
    scaler.update();
    total.add_(loss.detach());
  });
  auto validate = [&] {
    NoGrad off;
    net.eval();
    Tensor sum = zeros({}, {.device = device});
    for (int i = 0; i < 8; ++i) {
      int64_t at = i * (test_text.size(0) - o.context - 1) / 8;
      sum.add_(loss_of(net, {test_text.slice(0, at, at + o.context).unsqueeze(0), test_text.slice(0, at + 1, at + 1 + o.context).unsqueeze(0)}, o.mixed()));
    }
    net.train();
    return sum.item() / 8;
  };

  Session session(o, "gpt", o.steps, o.every);
  session.checkpoint.add("net", net).add("opt", opt).add("schedule", schedule);
  if (scaler.enabled()) session.checkpoint.add("scaler", scaler);
  int64_t weights = 0;
  for (auto& p : net.parameters()) weights += p.numel();
  std::printf("%zu characters, %zu pieces, %lld different; %lld parameters\n", all.size(), numbers.size(), static_cast<long long>(vocabulary.size()),
              static_cast<long long>(weights));
  double bigrams = bigram_loss(training, validation, vocabulary.size()), loss = 0, test_loss = 0;
  std::printf("pairs of pieces alone give a loss of %.3f on the last tenth of the text\n", bigrams);
  int64_t done = session.begin();
  for (int64_t since = done; session.more(done);) {
    auto [x, target] = draw(train_text, o.batch, o.context);
    step(x, target);
    if (++done % o.every != 0 && done != o.steps) continue;
    loss = total.item() / static_cast<double>(done - since);
    test_loss = validate();
    session.log(done, {{"loss", loss}, {"test loss", test_loss}});
    total.zero_();
    since = done;
  }
  if (session.interrupted()) return 130;  // as a shell reports Ctrl-C
  std::string sample = vocabulary.decode(write_on(net, o, prompt));
  session.board().text("sample", sample, done);
  std::printf("\n%s\n\n", sample.c_str());
  std::printf("loss %.3f; on the last tenth of the text %.3f, pairs %.3f: %s\n", loss, test_loss, bigrams,
              test_loss < bigrams ? "better than pairs" : "not yet better than pairs; give it more --steps");
  io::save(o.file("gpt.safetensors"), net.state_dict());
  o.write_metrics({{"loss", loss}, {"test_loss", test_loss}, {"bigram_loss", bigrams}, {"steps", o.steps}, {"skipped_steps", scaler.enabled() ? scaler.skipped_steps() : 0}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments(
      "gpt",
      "Trains a small GPT on the characters of a text file, or on its words, and writes on from a prompt. OUT gets gpt.safetensors, metrics.json and checkpoints.",
      {"gpt --text book.txt",
       "gpt --text book.txt --device cuda --capture --precision fp16 --width 384 --layers 6 --heads 6 --context 256 --steps 5000",
       "gpt --text book.txt --resume --prompt \"It was\""});
  arguments.add_file("--text", o.text, "any text file, such as a book from gutenberg.org", true);
  o.add_to(arguments);
  arguments.add("--steps", o.steps, "training steps", Arguments::positive);
  arguments.add("--every", o.every, "steps between checkpoints and validations", Arguments::positive);
  arguments.add("--batch", o.batch, "rows of text a step", Arguments::positive);
  arguments.add("--context", o.context, "pieces a row", Arguments::positive);
  arguments.add("--words", o.words, "of the text (of the letters A to Z), the most frequent, that are pieces of their own beside its characters", Arguments::not_negative);
  arguments.add("--width", o.width, "of the model", Arguments::positive);
  arguments.add("--heads", o.heads, "of attention; they divide the width", Arguments::positive);
  arguments.add("--layers", o.layers, "of attention", Arguments::positive);
  arguments.add("--dropout", o.dropout, "share of activations left out in training", Arguments::share);
  arguments.add("--lr", o.lr, "largest learning rate", Arguments::not_negative);
  arguments.add("--sample", o.sample, "pieces to write at the end", Arguments::not_negative);
  arguments.add("--temperature", o.temperature, "of the sample: below 1 is surer, above 1 is wilder", Arguments::positive);
  arguments.add("--prompt", o.prompt, "how the sample begins; by default with the text's first piece");
  return arguments.run(argc, argv, [&] { return run(o); });
}
