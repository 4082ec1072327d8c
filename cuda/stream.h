#pragma once
// Streams and events for work that runs beside a device's own stream: copies ahead of use, communication. A tensor that
// was made on one stream and is used on another is recorded there, so that its memory is not reused too soon.
#include <memory>

#include "halftone/core/tensor.h"

namespace halftone::cuda {

class Event;

// A stream of its own, which waits for no other unless told to. Destroying it waits for its work.
class HT_API Stream {
 public:
  explicit Stream(int device = 0);
  ~Stream();
  Stream(const Stream&) = delete;
  int device() const { return device_; }
  void* handle() const { return handle_; }
  // Work queued from now on runs after the event.
  void wait(const Event& event) const;
  void synchronize() const;

 private:
  int device_;
  void* handle_ = nullptr;
};

// A point in a stream.
class HT_API Event {
 public:
  Event() = default;
  ~Event();
  Event(const Event&) = delete;
  // Behind what this thread's current stream of the device has queued so far.
  void record(int device = 0);
  bool done() const;         // true, too, when it was never recorded
  void synchronize() const;  // the host waits
  // This thread's current stream of the device goes on after the event.
  void wait(int device = 0) const;
  void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
};

// Makes a stream this thread's, and its device this thread's device.
class HT_API StreamGuard {
 public:
  [[nodiscard]] explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;

 private:
  int saved_device_;
  void* saved_stream_;
};

// `stream` uses t, whose memory belongs to another: it is not reused before the stream has passed what is queued now.
HT_API void record_stream(const Tensor& t, const Stream& stream);

}  // namespace halftone::cuda
