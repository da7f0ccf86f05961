// Streams of the emulated device: each a queue of tasks with a thread of its own.
//
// Everything that a device does (kernels, copies, event records, event waits) is a task. A task is
// given addresses, not owners: it keeps no memory alive, as a kernel keeps none.
//
//   push(stream, Work::kernel, [=] { ... });   // returns at once
//   MarkPtr mark = record(stream);             // set once the stream has come so far
//   wait_for(other, mark);                     // the other stream stops there until it is set
//   synchronize(stream);                       // the caller waits, and is told what failed
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace emulated {

using Clock = std::chrono::steady_clock;

// A point in a queue, reached once.
class Mark {
 public:
  void set();
  bool is_set() const;
  void wait() const;
  Clock::time_point when() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_set_ = false;
  Clock::time_point when_;
};

using MarkPtr = std::shared_ptr<Mark>;

// What a task is decides how long it is delayed; `order` is never delayed.
enum class Work { kernel, h2d, d2h, d2d, order };

struct Delays {
  int64_t kernel_us = 0, h2d_us = 0, d2h_us = 0;
  int64_t jitter_us = 0;
  // Added to each delay: 0 to jitter_us, drawn for each stream from a generator of its own, so that
  // what a stream draws does not depend on how the threads take turns.
  uint64_t seed = 0;
};

// Each device has a default stream, and others that are handed out in turn. A stream's number is
// also its id, and says of which device it is.
constexpr int NUM_DEVICES = 2;
constexpr int POOL_SIZE = 32;
constexpr int PER_DEVICE = 1 + POOL_SIZE;

inline int device_of(int stream) {
  return stream / PER_DEVICE;
}
inline int default_stream(int device) {
  return device * PER_DEVICE;
}

void push(int stream, Work kind, std::function<void()> task);
// Queued before the next kernel or copy of the stream, the next time somebody waits for the stream,
// or by queue_deferred(): whatever comes first. Event records and waits still go ahead of it.
void defer(int stream, const void* key, std::function<void()> task);
void queue_deferred(int stream, const void* key);
MarkPtr record(int stream);
void wait_for(int stream, MarkPtr mark);
bool is_idle(int stream);
int next_of_pool(int device);
// Each thread has a current device, and for each device a current stream.
int current_device();
int exchange_device(int device);
int current();
int current(int device);
int exchange_current(int stream);

// Waiting lets other Python threads run: one of them may have to open a gate first.
void await(const Mark& mark);
// These also throw what a task threw since this was last asked, as CUDA reports a failed kernel.
void synchronize(int stream);
void synchronize_device(int device);
void synchronize_all();
void throw_failure();

void set_delays(const Delays& delays);

} // namespace emulated
