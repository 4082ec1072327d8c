// Files: what fails says so in one sentence, and a file that is replaced is whole whatever fails.
#include "halftone/io/file.h"

#include <cerrno>
#include <vector>

#include "halftone/tests/catch.h"
#include "halftone/tests/faults.h"
#include "halftone/tests/temporary.h"

namespace {

using namespace halftone;
using namespace halftone::io;

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const auto& w : words) all += w + " ";
  return all;
}

}  // namespace

TEST_CASE("a file is replaced in the order that survives a power cut") {
  const Temporary t;
  Faults faults;
  {
    const UseFileOps use(faults);
    replace_file(t / "a", "new");
  }
  CHECK(joined(faults.calls) == "create write sync close rename folder sync close ");
  CHECK(bytes_of(t / "a") == "new");
  CHECK(t.list() == "a ");
}

TEST_CASE("whichever call fails, the file is the old one or the new one, and no temporary stays") {
  for (int fail_at = 0; fail_at < 8; ++fail_at) {
    const Temporary t;
    write_bytes(t / "a", "old");
    Faults faults;
    faults.fail_at = fail_at;
    std::string error;
    {
      const UseFileOps use(faults);
      error = error_of([&] { replace_file(t / "a", "new"); }, t.folder);
    }
    INFO("call " << fail_at << ": " << error);
    const bool renamed = fail_at > 4;
    CHECK(bytes_of(t / "a") == (renamed ? "new" : "old"));
    CHECK(t.list() == "a ");
    CHECK(error.empty() == (fail_at == 7));  // the folder's own close: everything is on the disk by then
  }
}

TEST_CASE("a full disk at any write keeps the old file") {
  const Temporary t;
  write_bytes(t / "a", "old");
  const std::string content(1000, 'x');
  for (int fail_at = 1; fail_at <= 10; ++fail_at) {
    Faults faults;
    faults.fail_at = fail_at;
    faults.longest_write = 100;
    const UseFileOps use(faults);
    CHECK(error_of([&] { replace_file(t / "a", content); }, t.folder) == "a: cannot write: No space left on device");
    CHECK(bytes_of(t / "a") == "old");
    CHECK(t.list() == "a ");
  }
}

TEST_CASE("short and interrupted calls are carried on") {
  const Temporary t;
  std::string content;
  for (int i = 0; i < 1000; ++i) content += static_cast<char>(i * 7);
  Faults faults;
  faults.longest_write = 9;
  faults.longest_read = 11;
  faults.interrupt = true;
  const UseFileOps use(faults);
  OpenFile file(t / "a", FileOps::Open::truncate);
  file.write(content);
  file.sync();
  file.close();
  CHECK(read_file(t / "a") == content);
}

TEST_CASE("a real full device is not mistaken for a disk") {
  if (!std::filesystem::exists("/dev/full")) HT_SKIP("no /dev/full");
  const OpenFile full("/dev/full", FileOps::Open::append);
  CHECK(error_of([&] { full.write("12345678"); }) == "/dev/full: cannot write: No space left on device");
}

TEST_CASE("reading says what is wrong") {
  const Temporary t;
  write_bytes(t / "a", "12345");
  CHECK(error_of([&] { read_file(t / "b"); }, t.folder) == "b: cannot open: No such file or directory");
  CHECK(error_of([&] { read_file(t.folder); }) == t.folder + ": cannot read: it is a folder");
  CHECK(error_of([&] { read_file("/dev/null"); }) == "/dev/null: cannot read: it is not a file");
  CHECK(error_of([&] { read_file(std::string("a\0b", 3)); }) == "a: a file's name cannot go on with a zero byte");
  const InputFile file(t / "a");
  CHECK(file.size() == 5);
  char bytes[8];
  file.read(bytes, 3, 2);
  CHECK(std::string(bytes, 3) == "345");
  CHECK(error_of([&] { file.read(bytes, 5, 2); }, t.folder) == "a: ended at byte 5 while it was read; expected 2 more");
  try {
    read_file(t / "b");
  } catch (const FileError& e) {
    CHECK(e.reason == ENOENT);
  }
}

TEST_CASE("what cannot be replaced is refused before anything is written") {
  const Temporary t;
  CHECK(error_of([&] { replace_file(t / "no/a", ""); }, t.folder) == "no/a: cannot create: No such file or directory");
  CHECK(error_of([&] { replace_file(t.folder, ""); }) == t.folder + ": cannot replace: it is a folder");
  CHECK(error_of([&] { replace_file("/dev/null", ""); }) == "/dev/null: cannot replace: it is not a file");
  CHECK(t.list().empty());
}

TEST_CASE("a temporary that a killed process left is stepped over, and left alone") {
  const Temporary t;
  std::string name;
  {
    const AtomicFile given_up(t / "a");
    name = t.list();
  }
  CHECK(t.list().empty());
  const size_t dot = name.rfind('.');
  const std::string next = name.substr(0, dot + 1) + std::to_string(std::stoi(name.substr(dot + 1)) + 1);
  write_bytes(t / next, "half");
  replace_file(t / "a", "whole");
  CHECK(bytes_of(t / "a") == "whole");
  CHECK(t.list() == "a " + next + " ");
}

TEST_CASE("folders are made with those above them") {
  const Temporary t;
  make_folders(t / "a/b//c/");
  make_folders(t / "a/b");
  CHECK(std::filesystem::is_directory(t / "a/b/c"));
  write_bytes(t / "file", "");
  CHECK(error_of([&] { make_folders(t / "file/x"); }, t.folder) == "file: cannot make the folder: File exists");
}
