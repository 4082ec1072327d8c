#include "halftone/core/tuning.h"

#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <random>

#include "halftone/core/error.h"
#include "halftone/core/thread_state.h"

namespace halftone {
namespace {

constexpr auto first_line = "halftone tuning 1";
constexpr auto separator = " -> ";

thread_local bool on = false;
std::mutex lock;
std::map<std::string, std::string>& choices() {
  static auto* all = new std::map<std::string, std::string>;
  return *all;
}

// What is known already stays.
void read(const std::string& file) {
  std::ifstream in(file);
  if (!in) return;  // the first run
  std::string line;
  HT_CHECK(std::getline(in, line) && line == first_line, "tune: ", file, " is not a file of tuned choices; remove it or name another");
  for (int number = 2; std::getline(in, line); ++number) {
    size_t at = line.find(separator);
    HT_CHECK(at != std::string::npos && at > 0, "tune: ", file, ", line ", number, " is damaged; remove the file to tune anew");
    std::lock_guard guard(lock);
    choices().emplace(line.substr(0, at), line.substr(at + std::string(separator).size()));
  }
}

void write(const std::string& file) {
  std::string next = file + "." + std::to_string(std::random_device{}());  // others may write the same file now
  {
    std::ofstream out(next);
    out << first_line << '\n';
    std::lock_guard guard(lock);
    for (auto& [problem, choice] : choices()) out << problem << separator << choice << '\n';
    out.flush();
    if (!out) {
      std::remove(next.c_str());
      throw Error("tune: cannot write " + file + "; what was tuned is lost when this process ends");
    }
  }
  HT_CHECK(std::rename(next.c_str(), file.c_str()) == 0, "tune: cannot write ", file, "; what was tuned is lost when this process ends");
}

}  // namespace

void tune(const std::function<void()>& work, const std::string& file) {
  check_may_sync("tune");
  if (!file.empty()) read(file);
  struct On {
    bool before = on;
    On() { on = true; }
    ~On() { on = before; }
  };
  {
    On inside;
    work();
  }
  if (!file.empty()) write(file);
}

bool tuning() { return on; }

std::optional<std::string> tuned_choice(const std::string& problem) {
  std::lock_guard guard(lock);
  auto found = choices().find(problem);
  return found == choices().end() ? std::nullopt : std::optional(found->second);
}
void set_tuned_choice(const std::string& problem, const std::string& choice) {
  std::lock_guard guard(lock);
  choices()[problem] = choice;
}

}  // namespace halftone
