#pragma once
// Files. Every system call of this folder passes through FileOps, so that tests can make any of them fail.
// A file that is replaced is the old one or the new one at every instant, whatever fails: see AtomicFile.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "halftone/core/error.h"

namespace halftone::io {

// "<path>: cannot <do what>: <the system's reason>".
struct HT_API FileError : Error {
  FileError(const std::string& path, std::string_view what, int reason);
  int reason;  // a value of errno
};

struct FileStatus {
  enum class Kind : uint8_t { file, folder, other } kind = Kind::file;
  int64_t size = 0;  // bytes
};

// The system's calls on files. Each returns what the system does: a negative number and errno when it failed.
class HT_API FileOps {
 public:
  enum class Open : uint8_t {
    read,      // an existing file
    create,    // a new file; fails where there is one
    append,    // made if need be; writes go to its end
    truncate,  // made if need be, emptied
    folder,    // for sync
  };
  FileOps() = default;
  FileOps(const FileOps&) = delete;
  virtual ~FileOps() = default;
  virtual int open(const char* path, Open how);
  virtual int status(int fd, FileStatus& status);
  virtual int status(const char* path, FileStatus& status);
  virtual int64_t read(int fd, void* to, size_t bytes, int64_t offset);
  virtual int64_t write(int fd, const void* from, size_t bytes);
  virtual int sync(int fd);
  virtual int close(int fd);
  virtual int rename(const char* from, const char* to);
  virtual int remove(const char* path);
  virtual int make_folder(const char* path);
  virtual int list(const char* path, std::vector<std::string>& names);  // in a folder, in any order, "." and ".." left out
};
// The calls that are used now: the system's own, unless a UseFileOps lives.
HT_API FileOps& file_ops();

// Puts `ops` in their place, in the whole process.
class HT_API UseFileOps {
 public:
  [[nodiscard]] explicit UseFileOps(FileOps& ops);
  ~UseFileOps();
  UseFileOps(const UseFileOps&) = delete;

 private:
  FileOps* saved_;
};

// An open file and its name. Closes without a word; close() reports.
class HT_API OpenFile {
 public:
  // Errors call it `name`; by default, its path.
  OpenFile(std::string path, FileOps::Open how, std::string name = {});
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  const std::string& path() const { return path_; }
  FileStatus status() const;
  // Exactly `bytes` bytes; throws when the file ends before.
  void read(void* to, int64_t bytes, int64_t offset) const;
  // All of them, however many calls it takes.
  void write(const void* from, size_t bytes) const;
  void write(std::string_view text) const { write(text.data(), text.size()); }
  void sync() const;
  void close();

 private:
  std::string path_, name_;
  int fd_;
};

// A file to read, of a size known beforehand. Throws FileError where there is none, or something else.
class HT_API InputFile {
 public:
  explicit InputFile(std::string path);
  const std::string& path() const { return file_.path(); }
  int64_t size() const { return size_; }
  void read(void* to, int64_t bytes, int64_t offset) const { file_.read(to, bytes, offset); }

 private:
  OpenFile file_;
  int64_t size_;
};

// Replaces a file as one step. Bytes go to a temporary file beside it ("<path>.tmp.<process>.<number>"), which takes
// its name once everything is on the disk. A file that fails or is given up before leaves the old one as it was.
// A symbolic link is itself replaced; anything but a file, such as a device, is refused.
class HT_API AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  void write(const void* from, size_t bytes) const { file_.write(from, bytes); }
  void write(std::string_view text) const { file_.write(text); }
  void commit();

 private:
  std::string path_;
  OpenFile file_;
  bool renamed_ = false;
};

HT_API std::string read_file(const std::string& path);
HT_API void replace_file(const std::string& path, std::string_view content);
// The folder and those above it, where they are missing.
HT_API void make_folders(const std::string& path);

}  // namespace halftone::io
