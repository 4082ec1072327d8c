// A small GPT on the characters of any text file (Radford et al., "Language models are unsupervised multitask learners", 2019): trains,
// compares itself with a model of pairs of characters, and writes text of its own.
// ctest: --text @data@/../README.md --steps 12 --every 6 --batch 4 --context 16 --width 16 --heads 2 --layers 1 --sample 40 --fresh --out gpt_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  std::string text, prompt;
  int64_t steps = 2000, every = 200, batch = 32, context = 128, width = 128, heads = 4, layers = 4, sample = 400;
  double lr = 1e-3, dropout = 0.1, temperature = 0.8;
  Options() : Run("runs/gpt") {}
};

// A text as numbers: each character that occurs has one.
struct Characters {
  std::string letters;
  explicit Characters(const std::string& text) {
    std::set<char> seen(text.begin(), text.end());
    letters.assign(seen.begin(), seen.end());
  }
  int64_t size() const { return static_cast<int64_t>(letters.size()); }
  Tensor encode(const std::string& text) const {  // [n], i64
    std::vector<int64_t> all;
    for (char c : text) {
      HT_CHECK(letters.find(c) != std::string::npos, "the character '", c, "' does not occur in the text");
      all.push_back(static_cast<int64_t>(letters.find(c)));
    }
    return tensor(all);
  }
  std::string decode(const Tensor& numbers) const {
    std::string text;
    for (int64_t i : numbers.to_vector<int64_t>()) text += letters[static_cast<size_t>(i)];
    return text;
  }
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
  Gpt(int64_t letters, const Options& o) : tokens(letters, o.width), positions(o.context, o.width), norm(o.width), head(o.width, letters, {.bias = false}) {
    for (int64_t i = 0; i < o.layers; ++i) blocks.add(Block(o.width, o.heads, o.dropout));
    for (nn::Embedding* e : {&tokens, &positions}) nn::init::normal_(e->weight, 0, 0.02);
  }
  nn::Embedding tokens, positions;
  nn::ModuleList blocks;
  nn::LayerNorm norm;
  nn::Linear head;
  HT_FIELDS(tokens, positions, blocks, norm, head)
  Tensor forward(const Tensor& x) override {  // [n, t], i64 -> [n, t, letters]
    Tensor h = tokens(x) + positions.weight.slice(0, 0, x.size(1));
    for (auto& block : blocks) h = block(h);
    return head(norm(h));
  }
};

// Pieces of the text from random places, and what comes after each of their characters.
data::Batch draw(const Tensor& text, int64_t batch, int64_t context) {
  Tensor places = randint(0, text.size(0) - context, {batch, 1}, {.device = text.device()}) + arange(context, {.device = text.device()});
  return {index_select(text, 0, places.flatten()).view({batch, context}), index_select(text, 0, places.flatten() + 1).view({batch, context})};
}

Tensor loss_of(Gpt& net, const data::Batch& b, const amp::AutocastOptions& mixed) {
  amp::Autocast region(mixed);
  return cross_entropy(net(b.x).flatten(0, 1), b.target.flatten());
}

// What pairs of characters alone tell, counted in the training text.
double bigram_loss(const std::string& text, const std::string& test, const Characters& c) {
  auto n = static_cast<size_t>(c.size());
  std::vector<double> pairs(n * n, 0.1), singles(n, 0.1 * static_cast<double>(n));
  auto number = [&](char letter) { return c.letters.find(letter); };
  for (size_t i = 1; i < text.size(); ++i) {
    ++pairs[number(text[i - 1]) * n + number(text[i])];
    ++singles[number(text[i - 1])];
  }
  double sum = 0;
  for (size_t i = 1; i < test.size(); ++i) sum -= std::log(pairs[number(test[i - 1]) * n + number(test[i])] / singles[number(test[i - 1])]);
  return sum / static_cast<double>(test.size() - 1);
}

std::string write_on(Gpt& net, const Options& o, const Characters& c, Device device) {
  NoGrad off;
  amp::Autocast region(o.mixed());
  net.eval();
  Tensor text = c.encode(o.prompt.empty() ? "\n" : o.prompt).to(device);
  for (int64_t i = 0; i < o.sample; ++i) {
    Tensor seen = text.slice(0, std::max<int64_t>(0, text.size(0) - o.context), {}).unsqueeze(0);
    Tensor last = net(seen).select(0, 0).select(0, -1).to(DType::f32);
    text = cat({text, multinomial(softmax(last / o.temperature, 0), 1)});
  }
  net.train();
  return c.decode(text);
}

int run(const Options& o) {  // what the program ends with
  std::string all = io::read_file(o.text);
  size_t cut = all.size() * 9 / 10;
  std::string training = all.substr(0, cut), validation = all.substr(cut);
  HT_CHECK(static_cast<int64_t>(validation.size()) > o.context + 1, "--text: ", all.size(), " characters are too few for a context of ", o.context);
  Characters characters(all);
  Device device = o.place();
  manual_seed(o.seed);
  Gpt net(characters.size(), o);
  net.to(device);
  Tensor train_text = characters.encode(training).to(device), test_text = characters.encode(validation).to(device);
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
  std::printf("%zu characters, %lld different; %lld parameters\n", all.size(), static_cast<long long>(characters.size()), static_cast<long long>(weights));
  double bigrams = bigram_loss(training, validation, characters), loss = 0, test_loss = 0;
  std::printf("pairs of characters alone give a loss of %.3f on the last tenth of the text\n", bigrams);
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
  std::string sample = write_on(net, o, characters, device);
  session.board().text("sample", sample, done);
  std::printf("\n%s\n\n", sample.c_str());
  std::printf("loss %.3f; on the last tenth of the text %.3f, pairs of characters %.3f: %s\n", loss, test_loss, bigrams,
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
      "Trains a small GPT on the characters of a text file and writes on from a prompt. OUT gets gpt.safetensors, metrics.json and checkpoints.",
      {"gpt --text book.txt",
       "gpt --text book.txt --device cuda --capture --precision fp16 --width 384 --layers 6 --heads 6 --context 256 --steps 5000",
       "gpt --text book.txt --resume --prompt \"It was\""});
  arguments.add_file("--text", o.text, "any text file, such as a book from gutenberg.org", true);
  o.add_to(arguments);
  arguments.add("--steps", o.steps, "training steps", Arguments::positive);
  arguments.add("--every", o.every, "steps between checkpoints and validations", Arguments::positive);
  arguments.add("--batch", o.batch, "pieces of text a step", Arguments::positive);
  arguments.add("--context", o.context, "characters a piece", Arguments::positive);
  arguments.add("--width", o.width, "of the model", Arguments::positive);
  arguments.add("--heads", o.heads, "of attention; they divide the width", Arguments::positive);
  arguments.add("--layers", o.layers, "of attention", Arguments::positive);
  arguments.add("--dropout", o.dropout, "share of activations left out in training", Arguments::share);
  arguments.add("--lr", o.lr, "largest learning rate", Arguments::not_negative);
  arguments.add("--sample", o.sample, "characters to write at the end", Arguments::not_negative);
  arguments.add("--temperature", o.temperature, "of the sample: below 1 is surer, above 1 is wilder", Arguments::positive);
  arguments.add("--prompt", o.prompt, "how the sample begins");
  return arguments.run(argc, argv, [&] { return run(o); });
}
