#include <Python.h>

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include "queues.h"

namespace emulated {

void Mark::set() {
  std::lock_guard<std::mutex> guard(mutex_);
  is_set_ = true;
  when_ = Clock::now();
  changed_.notify_all();
}

bool Mark::is_set() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return is_set_;
}

void Mark::wait() const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

Clock::time_point Mark::when() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return when_;
}

namespace {

struct Task {
  Work kind;
  std::function<void()> run;
};

struct Settings {
  std::mutex mutex;
  Delays delays;
  uint64_t epoch = 0; // changes with the settings, so that each stream seeds anew
};

struct Failures {
  std::mutex mutex;
  std::exception_ptr first;
};

// All of these are leaked: threads still use them while the process ends.
Settings& settings() {
  static auto* one = new Settings();
  return *one;
}

Failures& failures() {
  static auto* one = new Failures();
  return *one;
}

class Queue {
 public:
  explicit Queue(int stream) : stream_(stream) {}

  void push(Task task) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (task.kind != Work::order) {
      add_deferred();
    }
    add(std::move(task));
  }

  void defer(const void* key, std::function<void()> task) {
    std::lock_guard<std::mutex> guard(mutex_);
    deferred_.emplace_back(key, std::move(task));
  }

  void push_deferred() {
    std::lock_guard<std::mutex> guard(mutex_);
    add_deferred();
  }

  void push_deferred(const void* key) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto one = deferred_.begin(); one != deferred_.end(); ++one) {
      if (one->first == key) {
        add({Work::order, std::move(one->second)});
        deferred_.erase(one);
        return;
      }
    }
  }

  bool is_idle() {
    std::lock_guard<std::mutex> guard(mutex_);
    return tasks_.empty() && !is_busy_;
  }

 private:
  void add(Task task) {
    if (!is_started_) {
      is_started_ = true;
      std::thread([this] { work(); }).detach();
    }
    tasks_.push_back(std::move(task));
    arrived_.notify_one();
  }

  void add_deferred() {
    for (auto& one : deferred_) {
      add({Work::order, std::move(one.second)});
    }
    deferred_.clear();
  }

  [[noreturn]] void work() {
    at::init_num_threads(); // as many as torch.set_num_threads said, so that sums are the same bits
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    while (true) {
      Task task = next();
      delay(task.kind);
      try {
        task.run();
      } catch (...) {
        std::lock_guard<std::mutex> guard(failures().mutex);
        if (!failures().first) {
          failures().first = std::current_exception();
        }
      }
      task.run = nullptr; // before it counts as done: what it holds goes first
      std::lock_guard<std::mutex> guard(mutex_);
      is_busy_ = false;
    }
  }

  Task next() {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_.wait(lock, [this] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_busy_ = true;
    return task;
  }

  void delay(Work kind) {
    if (kind == Work::order) {
      return;
    }
    int64_t us = 0;
    {
      std::lock_guard<std::mutex> guard(settings().mutex);
      const Delays& delays = settings().delays;
      if (epoch_ != settings().epoch) {
        epoch_ = settings().epoch;
        random_.seed(delays.seed * 1000003 + stream_);
      }
      us = kind == Work::kernel ? delays.kernel_us
          : kind == Work::h2d   ? delays.h2d_us
          : kind == Work::d2h   ? delays.d2h_us
                                : 0;
      if (delays.jitter_us > 0) {
        us += random_() % (delays.jitter_us + 1);
      }
    }
    if (us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
  }

  const int stream_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Task> tasks_;
  std::vector<std::pair<const void*, std::function<void()>>> deferred_;
  bool is_started_ = false;
  bool is_busy_ = false;
  uint64_t epoch_ = ~uint64_t(0);
  std::mt19937_64 random_;
};

constexpr int NUM_STREAMS = NUM_DEVICES * PER_DEVICE;

Queue& queue(int stream) {
  static auto* all = [] {
    auto* made = new std::array<Queue*, NUM_STREAMS>();
    for (int i = 0; i < NUM_STREAMS; ++i) {
      (*made)[i] = new Queue(i);
    }
    return made;
  }();
  TORCH_CHECK(
      stream >= 0 && stream < NUM_STREAMS, "stream ", stream, " of emulated devices, there are ",
      NUM_STREAMS);
  return *(*all)[stream];
}

void check_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < NUM_DEVICES, "emulated device ", device, ", there are ", NUM_DEVICES);
}

std::array<int, NUM_DEVICES> default_streams() {
  std::array<int, NUM_DEVICES> found{};
  for (int device = 0; device < NUM_DEVICES; ++device) {
    found[device] = default_stream(device);
  }
  return found;
}

thread_local int device_now = 0;
thread_local std::array<int, NUM_DEVICES> streams_now = default_streams();

} // namespace

void push(int stream, Work kind, std::function<void()> task) {
  queue(stream).push({kind, std::move(task)});
}

void defer(int stream, const void* key, std::function<void()> task) {
  queue(stream).defer(key, std::move(task));
}

void queue_deferred(int stream, const void* key) {
  queue(stream).push_deferred(key);
}

MarkPtr record(int stream) {
  auto mark = std::make_shared<Mark>();
  push(stream, Work::order, [mark] { mark->set(); });
  return mark;
}

void wait_for(int stream, MarkPtr mark) {
  push(stream, Work::order, [mark = std::move(mark)] { mark->wait(); });
}

bool is_idle(int stream) {
  return queue(stream).is_idle();
}

int next_of_pool(int device) {
  static std::array<std::atomic<unsigned>, NUM_DEVICES> next{};
  check_device(device);
  return default_stream(device) + 1 + static_cast<int>(next[device]++ % POOL_SIZE);
}

int current_device() {
  return device_now;
}

int exchange_device(int device) {
  check_device(device);
  return std::exchange(device_now, device);
}

int current() {
  return streams_now[device_now];
}

int current(int device) {
  check_device(device);
  return streams_now[device];
}

int exchange_current(int stream) {
  queue(stream); // checks that there is one
  return std::exchange(streams_now[device_of(stream)], stream);
}

void await(const Mark& mark) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    Py_BEGIN_ALLOW_THREADS;
    mark.wait();
    Py_END_ALLOW_THREADS;
  } else {
    mark.wait();
  }
}

void throw_failure() {
  std::exception_ptr first;
  {
    std::lock_guard<std::mutex> guard(failures().mutex);
    std::swap(first, failures().first);
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void synchronize(int stream) {
  queue(stream).push_deferred();
  await(*record(stream));
  throw_failure();
}

namespace {

void synchronize_streams(int begin, int end) {
  std::vector<MarkPtr> marks;
  for (int stream = begin; stream < end; ++stream) {
    queue(stream).push_deferred();
    if (!is_idle(stream)) {
      marks.push_back(record(stream));
    }
  }
  for (const auto& mark : marks) {
    await(*mark);
  }
  throw_failure();
}

} // namespace

void synchronize_device(int device) {
  check_device(device);
  synchronize_streams(default_stream(device), default_stream(device) + PER_DEVICE);
}

void synchronize_all() {
  synchronize_streams(0, NUM_STREAMS);
}

void set_delays(const Delays& delays) {
  std::lock_guard<std::mutex> guard(settings().mutex);
  settings().delays = delays;
  ++settings().epoch;
}

} // namespace emulated
