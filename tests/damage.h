// Small files that are cut or changed anywhere: each is one Error that names the file, or a value that such a file can hold, and nobody
// asked for memory beyond that on the way. A program that includes this counts what operator new is asked for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "halftone/core/backend.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

inline std::atomic<int64_t> largest_request = 0;  // of the heap, in bytes

[[gnu::noinline]] void* operator new(size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  for (int64_t before = largest_request; before < size && !largest_request.compare_exchange_weak(before, size);) {}
  if (void* memory = std::malloc(std::max<size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
// By name, too: a sanitizer's own would not go with the delete below.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(std::max<size_t>(bytes, 1)); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// A value may take `ratio` times the file's bytes, and each request for memory `slack` more: for names, messages and buffers.
struct DamageLimits { int64_t ratio = 1, slack = 1 << 14; };

// Calls load(path), which returns the bytes that it holds then, for every shorter file and for every byte of it changed: to every value
// where HALFTONE_FULL is set, else to some.
template <class Load>
void try_damage(const std::string& whole, Load&& load, DamageLimits limits = {}) {
  using namespace halftone;
  const Temporary t;
  const auto read = [&](const std::string& bytes) {
    write_bytes(t / "f", bytes);
    reset_peak_memory(Device::cpu());
    const int64_t before = memory_stats(Device::cpu()).allocated, most = limits.ratio * static_cast<int64_t>(bytes.size());
    int64_t held = -1;
    largest_request = 0;
    const std::string error = error_of([&] { held = load(t / "f"); }, t.folder);
    const int64_t asked = std::max(largest_request.load(), memory_stats(Device::cpu()).peak - before);
    if (held < 0 ? !error.starts_with("f: ") || error.find('\n') != std::string::npos : held > most) FAIL_CHECK(error << ", " << held);
    if (asked > most + limits.slack) FAIL_CHECK(asked << " bytes asked for, by a file of " << bytes.size() << ": " << error);
  };
  for (size_t n = 0; n < whole.size(); ++n) read(whole.substr(0, n));
  for (size_t at = 0; at < whole.size(); ++at)
    for (int change = 1; change < 256; change += std::getenv("HALFTONE_FULL") ? 1 : 23) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ change);
      read(bytes);
    }
}
