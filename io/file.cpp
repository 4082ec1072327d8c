// Checked POSIX calls: interrupted ones are repeated, short ones continued, and every result is looked at. A stream of
// the standard library would hide a full disk.
#include "halftone/io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

namespace halftone::io {
namespace {

constexpr size_t largest_call = size_t{1} << 30;  // Linux moves at most 2 GiB a call

FileStatus from_stat(const struct stat& s) {
  using Kind = FileStatus::Kind;
  return {S_ISREG(s.st_mode) ? Kind::file : S_ISDIR(s.st_mode) ? Kind::folder : Kind::other, s.st_size};
}

template <class F>
auto uninterrupted(F&& call) {
  for (;;) {
    auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

std::string_view verb(FileOps::Open how) {
  switch (how) {
    case FileOps::Open::read:
      return "open";
    case FileOps::Open::create:
      return "create";
    case FileOps::Open::folder:
      return "open the folder";
    default:
      return "open for writing";
  }
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return path.substr(0, std::max<size_t>(slash, 1));
}

std::atomic<FileOps*> current{nullptr};

// A name beside `path` that no file has. A process killed earlier may have left one with our number.
std::string temporary_beside(const std::string& path) {
  static std::atomic<unsigned> count{0};
  FileStatus status;
  HT_CHECK(file_ops().status(path.c_str(), status) < 0 || status.kind == FileStatus::Kind::file, path,
           ": cannot replace: it is ", status.kind == FileStatus::Kind::folder ? "a folder" : "not a file");
  for (;;) {
    std::string name = text::cat(path, ".tmp.", static_cast<int64_t>(::getpid()), ".", count++);
    if (file_ops().status(name.c_str(), status) < 0) return name;
  }
}

}  // namespace

FileError::FileError(const std::string& path, std::string_view what, int reason_)
    : Error(text::cat(path, ": cannot ", what, ": ", std::generic_category().message(reason_))), reason(reason_) {}

int FileOps::open(const char* path, Open how) {
  constexpr int make = O_WRONLY | O_CREAT | O_CLOEXEC;
  switch (how) {
    // Without O_NONBLOCK, a pipe would wait for its other end instead of being refused.
    case Open::read:
      return ::open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    case Open::create:
      return ::open(path, make | O_EXCL, 0666);
    case Open::append:
      return ::open(path, make | O_APPEND, 0666);
    case Open::truncate:
      return ::open(path, make | O_APPEND | O_TRUNC, 0666);
    case Open::folder:
      return ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  errno = EINVAL;
  return -1;
}
int FileOps::status(int fd, FileStatus& status) {
  struct stat s;
  const int result = ::fstat(fd, &s);
  if (result == 0) status = from_stat(s);
  return result;
}
int FileOps::status(const char* path, FileStatus& status) {
  struct stat s;
  const int result = ::stat(path, &s);
  if (result == 0) status = from_stat(s);
  return result;
}
int64_t FileOps::read(int fd, void* to, size_t bytes, int64_t offset) { return ::pread(fd, to, bytes, offset); }
int64_t FileOps::write(int fd, const void* from, size_t bytes) { return ::write(fd, from, bytes); }
int FileOps::sync(int fd) { return ::fsync(fd); }
int FileOps::close(int fd) { return ::close(fd); }
int FileOps::rename(const char* from, const char* to) { return ::rename(from, to); }
int FileOps::remove(const char* path) { return ::unlink(path); }
int FileOps::make_folder(const char* path) { return ::mkdir(path, 0777); }
int FileOps::list(const char* path, std::vector<std::string>& names) {
  DIR* folder = ::opendir(path);
  if (!folder) return -1;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(folder);
    if (!entry) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  const int reason = errno;  // of the last readdir
  ::closedir(folder);
  errno = reason;
  return reason == 0 ? 0 : -1;
}

FileOps& file_ops() {
  static FileOps system;
  FileOps* ops = current.load(std::memory_order_acquire);
  return ops ? *ops : system;
}
UseFileOps::UseFileOps(FileOps& ops) : saved_(current.exchange(&ops)) {}
UseFileOps::~UseFileOps() { current = saved_; }

OpenFile::OpenFile(std::string path, FileOps::Open how, std::string name)
    : path_(std::move(path)), name_(name.empty() ? path_ : std::move(name)) {
  HT_CHECK(path_.find('\0') == std::string::npos, path_.c_str(), ": a file's name cannot go on with a zero byte");
  fd_ = uninterrupted([&] { return file_ops().open(path_.c_str(), how); });
  if (fd_ < 0) throw FileError(name_, verb(how), errno);
}
OpenFile::~OpenFile() {
  if (fd_ >= 0) file_ops().close(fd_);
}

FileStatus OpenFile::status() const {
  FileStatus s;
  if (file_ops().status(fd_, s) < 0) throw FileError(name_, "ask for its size", errno);
  return s;
}

void OpenFile::read(void* to, int64_t bytes, int64_t offset) const {
  auto* at = static_cast<char*>(to);
  for (int64_t done = 0; done < bytes;) {
    const size_t next = std::min(static_cast<size_t>(bytes - done), largest_call);
    const int64_t n = uninterrupted([&] { return file_ops().read(fd_, at + done, next, offset + done); });
    if (n < 0) throw FileError(name_, "read", errno);
    HT_CHECK(n > 0, name_, ": ended at byte ", offset + done, " while it was read; expected ", bytes - done, " more");
    done += n;
  }
}

void OpenFile::write(const void* from, size_t bytes) const {
  auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const int64_t n = uninterrupted([&] { return file_ops().write(fd_, at, std::min(bytes, largest_call)); });
    if (n <= 0) throw FileError(name_, "write", n < 0 ? errno : EIO);
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

void OpenFile::sync() const {
  if (uninterrupted([&] { return file_ops().sync(fd_); }) < 0) throw FileError(name_, "flush to the disk", errno);
}

void OpenFile::close() {
  // Not repeated: after an interruption the descriptor is gone, and may be another file's.
  if (file_ops().close(std::exchange(fd_, -1)) < 0 && errno != EINTR) throw FileError(name_, "close", errno);
}

InputFile::InputFile(std::string path) : file_(std::move(path), FileOps::Open::read) {
  const FileStatus s = file_.status();
  HT_CHECK(s.kind != FileStatus::Kind::folder, file_.path(), ": cannot read: it is a folder");
  HT_CHECK(s.kind == FileStatus::Kind::file, file_.path(), ": cannot read: it is not a file");
  size_ = s.size;
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), file_(temporary_beside(path_), FileOps::Open::create, path_) {}
AtomicFile::~AtomicFile() {
  if (!renamed_) file_ops().remove(file_.path().c_str());
}

void AtomicFile::commit() {
  file_.sync();
  file_.close();
  if (file_ops().rename(file_.path().c_str(), path_.c_str()) < 0) throw FileError(path_, "replace", errno);
  renamed_ = true;
  const OpenFile folder(folder_of(path_), FileOps::Open::folder);
  try {
    folder.sync();
  } catch (const FileError& e) {
    if (e.reason != EINVAL) throw;  // some file systems cannot flush a folder; nothing more can be done there
  }
}

std::string read_file(const std::string& path) {
  const InputFile file(path);
  std::string content(static_cast<size_t>(file.size()), '\0');
  file.read(content.data(), file.size(), 0);
  return content;
}

void replace_file(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

void make_folders(const std::string& path) {
  for (size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string folder = path.substr(0, end);
    FileStatus s;
    if (file_ops().make_folder(folder.c_str()) == 0) continue;
    const int reason = errno;  // a folder of a read-only system may well be there
    if (file_ops().status(folder.c_str(), s) < 0 || s.kind != FileStatus::Kind::folder)
      throw FileError(folder, "make the folder", reason);
  }
}

}  // namespace halftone::io
