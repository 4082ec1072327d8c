// A disk that fails where a test wants it to.
#pragma once

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "halftone/io/file.h"

// The system, with every call noted, and the n-th failing.
struct Faults : halftone::io::FileOps {
  std::vector<std::string> calls;
  int fail_at = -1, reason = ENOSPC;
  size_t longest_write = SIZE_MAX, longest_read = SIZE_MAX;
  int64_t room = INT64_MAX;  // bytes that the disk still takes
  bool interrupt = false;  // every second call
  bool every_call = false;  // those that write no file, too

  bool fails(const std::string& call) {
    calls.push_back(call);
    const int number = static_cast<int>(calls.size()) - 1;
    if (interrupt && number % 2 == 0)
      errno = EINTR;
    else if (number == fail_at)
      errno = reason;
    else
      return false;
    return true;
  }
  int open(const char* path, Open how) override {
    constexpr const char* names[] = {"open", "create", "append", "truncate", "folder"};
    return fails(names[static_cast<int>(how)]) ? -1 : FileOps::open(path, how);
  }
  int64_t read(int fd, void* to, size_t bytes, int64_t offset) override {
    return fails("read") ? -1 : FileOps::read(fd, to, std::min(bytes, longest_read), offset);
  }
  int64_t write(int fd, const void* from, size_t bytes) override {
    if (fails("write")) return -1;
    if (room <= 0) {
      errno = ENOSPC;
      return -1;
    }
    const int64_t n = FileOps::write(fd, from, std::min({bytes, longest_write, static_cast<size_t>(room)}));
    room -= n;
    return n;
  }
  int sync(int fd) override { return fails("sync") ? -1 : FileOps::sync(fd); }
  int close(int fd) override {
    const bool failed = fails("close");
    const int saved = errno, result = FileOps::close(fd);
    errno = saved;
    return failed ? -1 : result;
  }
  int rename(const char* from, const char* to) override { return fails("rename") ? -1 : FileOps::rename(from, to); }
  int status(const char* path, halftone::io::FileStatus& s) override { return other("status") ? -1 : FileOps::status(path, s); }
  int remove(const char* path) override { return other("remove") ? -1 : FileOps::remove(path); }
  int make_folder(const char* path) override { return other("make_folder") ? -1 : FileOps::make_folder(path); }
  int list(const char* path, std::vector<std::string>& names) override {
    return other("list") ? -1 : FileOps::list(path, names);
  }

 private:
  bool other(const char* call) { return every_call && fails(call); }
};
