#include "memory.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "queues.h"

namespace emulated {

c10::Device device(int index) {
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
}

c10::Device device() {
  return device(current_device());
}

c10::Stream as_stream(int stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(device_of(stream)), stream);
}

int id_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == device().type(), "a stream of ", stream.device());
  // PyTorch takes 0 for the default stream of any device.
  return stream.id() == 0 ? default_stream(stream.device_index()) : static_cast<int>(stream.id());
}

namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t ALIGNMENT = 512;

void* system_allocate(size_t nbytes) {
  void* address = nullptr;
  TORCH_CHECK_WITH(
      OutOfMemoryError, posix_memalign(&address, ALIGNMENT, nbytes) == 0,
      "the emulated device cannot get ", nbytes, " bytes of the host");
  std::memset(address, POISON, nbytes);
  return address;
}

// Blocks are cached by stream and size, as CUDA's allocator does. A freed block is free for its own
// stream at once: what is queued there already runs before what its next owner queues.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    if (requested == 0) {
      return {nullptr, nullptr, &give_back, device()};
    }
    std::lock_guard<std::mutex> guard(mutex_);
    const size_t nbytes = (requested + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const int stream = current();
    collect_used_elsewhere();
    auto& free = free_[{stream, nbytes}];
    void* address = nullptr;
    if (free.empty()) {
      address = system_allocate(nbytes);
      stats_of(stream).reserved_bytes[0].increase(nbytes);
      stats_of(stream).segment[0].increase(1);
    } else {
      address = *free.begin(); // the lowest, as CUDA's does
      free.erase(free.begin());
      queue_deferred(stream, address);
    }
    blocks_[address] = Block{nbytes, stream, {}};
    DeviceStats& stats = stats_of(stream);
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(nbytes);
    stats.active_bytes[0].increase(nbytes);
    // The address is its own context, which raw_allocate asks for.
    return {address, address, &give_back, device()};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    synchronize(current());
    default_copy_data(target, source, nbytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    std::map<std::pair<int, size_t>, std::set<void*>> gone;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      collect_used_elsewhere();
      gone.swap(free_);
    }
    synchronize_all(); // cudaFree waits too; and queued tasks may still poison what goes here
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [key, addresses] : gone) {
      for (void* address : addresses) {
        std::free(address);
        stats_of(key.first).reserved_bytes[0].decrease(key.second);
        stats_of(key.first).segment[0].decrease(1);
      }
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(data.get_context());
    if (found != blocks_.end() && id_of(stream) != found->second.stream) {
      found->second.used_on.insert(id_of(stream));
    }
  }

  c10::Device device_at(void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(address);
    return found == blocks_.end() ? device() : device(device_of(found->second.stream));
  }

  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(mutex_);
    return stats_.at(index);
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(mutex_);
    each_stat(stats_.at(index), [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(mutex_);
    each_stat(stats_.at(index), [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  void free(void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(address);
    TORCH_INTERNAL_ASSERT(found != blocks_.end(), "not a block of the emulated device");
    Block block = std::move(found->second);
    blocks_.erase(found);
    stats_of(block.stream).allocation[0].decrease(1);
    stats_of(block.stream).allocated_bytes[0].decrease(block.nbytes);
    if (block.used_on.empty()) {
      make_free(address, block);
      return;
    }
    Pending pending{address, block, {}};
    for (int stream : block.used_on) {
      pending.marks.push_back(record(stream));
    }
    pending_.push_back(std::move(pending));
  }

 private:
  struct Block {
    size_t nbytes;
    int stream;
    std::set<int> used_on; // other streams: record_stream
  };
  struct Pending {
    void* address;
    Block block;
    std::vector<MarkPtr> marks;
  };

  static void give_back(void* address);

  // Poison comes as early as the next owner could write: with the next kernel of the stream, or
  // when the block is given out, for a copy on another stream. Not at once: what comes first may be
  // a wait for who still reads, as in a backward over several streams.
  void make_free(void* address, const Block& block) {
    const size_t nbytes = block.nbytes;
    defer(block.stream, address, [=] { std::memset(address, POISON, nbytes); });
    stats_of(block.stream).active_bytes[0].decrease(nbytes);
    free_[{block.stream, nbytes}].insert(address);
  }

  void collect_used_elsewhere() {
    auto is_used = [](const Pending& one) {
      return std::any_of(
          one.marks.begin(), one.marks.end(), [](const MarkPtr& mark) { return !mark->is_set(); });
    };
    std::vector<Pending> left;
    for (auto& one : pending_) {
      if (is_used(one)) {
        left.push_back(std::move(one));
      } else {
        make_free(one.address, one.block);
      }
    }
    pending_ = std::move(left);
  }

  DeviceStats& stats_of(int stream) {
    return stats_.at(device_of(stream));
  }

  template <typename F>
  static void each_stat(DeviceStats& of_device, F&& apply) {
    for (auto* stats :
         {&of_device.allocation, &of_device.segment, &of_device.allocated_bytes,
          &of_device.reserved_bytes, &of_device.active_bytes}) {
      for (auto& stat : *stats) {
        apply(stat);
      }
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<int, size_t>, std::set<void*>> free_;
  std::vector<Pending> pending_;
  std::array<DeviceStats, NUM_DEVICES> stats_;
};

DeviceMemory& device_memory() {
  static auto* one = new DeviceMemory(); // leaked: tensors outlive static objects
  return *one;
}

void DeviceMemory::give_back(void* address) {
  if (address != nullptr) {
    device_memory().free(address);
  }
}

// Where pinned memory is, and was: what goes back to the system is poisoned, and kept for a while,
// so that a copy that comes too late finds poison, and not memory of somebody else.
class PinnedRanges {
 public:
  void* add(size_t nbytes) {
    void* address = system_allocate(nbytes);
    std::lock_guard<std::mutex> guard(mutex_);
    ranges_[address] = nbytes;
    return address;
  }

  void remove(void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = ranges_.find(address);
    TORCH_INTERNAL_ASSERT(found != ranges_.end(), "not pinned");
    std::memset(address, POISON, found->second);
    gone_.emplace_back(address, found->second);
    gone_bytes_ += found->second;
    ranges_.erase(found);
    while (gone_bytes_ > KEPT_BYTES) {
      std::free(gone_.front().first);
      gone_bytes_ -= gone_.front().second;
      gone_.pop_front();
    }
  }

  bool contains(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto after = ranges_.upper_bound(const_cast<void*>(address));
    if (after == ranges_.begin()) {
      return false;
    }
    auto found = std::prev(after);
    return address < static_cast<char*>(found->first) + found->second;
  }

 private:
  static constexpr size_t KEPT_BYTES = size_t(64) << 20;

  std::mutex mutex_;
  std::map<void*, size_t> ranges_;
  std::deque<std::pair<void*, size_t>> gone_;
  size_t gone_bytes_ = 0;
};

PinnedRanges& pinned_ranges() {
  static auto* one = new PinnedRanges();
  return *one;
}

// The class that CUDA and XPU use, so that pinned memory is used again when it is on these.
struct PinnedMemory : at::CachingHostAllocatorImpl<c10::Stream, MarkPtr> {
 private:
  using Block = at::HostBlock<c10::Stream>;

  void allocate_host_memory(size_t nbytes, void** address) override {
    *address = pinned_ranges().add(nbytes);
  }

  void free_block(Block* block) override {
    pinned_ranges().remove(block->ptr_);
  }

  void record_stream(std::optional<std::vector<MarkPtr>>& events, c10::Stream stream) override {
    events->push_back(record(id_of(stream)));
  }

  bool query_event(MarkPtr& mark) override {
    return mark->is_set();
  }

  c10::Stream get_current_stream() const override {
    return as_stream(current());
  }

  bool stream_is_capturing(c10::Stream) const override {
    return false;
  }
};

void give_back_pinned(void* context);

struct PinnedAllocator final : at::CachingHostAllocatorInterface<PinnedMemory, give_back_pinned> {};

PinnedAllocator& the_pinned_allocator() {
  static auto* one = new PinnedAllocator(); // leaked: tensors outlive static objects
  return *one;
}

void give_back_pinned(void* context) {
  the_pinned_allocator().free(context);
}

const bool is_registered [[maybe_unused]] = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &the_pinned_allocator());
  return true;
}();

} // namespace

c10::Device device_at(void* address) {
  return device_memory().device_at(address);
}

c10::DeviceAllocator* device_allocator() {
  return &device_memory();
}

at::HostAllocator* pinned_allocator() {
  return &the_pinned_allocator();
}

bool is_pinned(const void* address) {
  return pinned_ranges().contains(address);
}

void note_use(const c10::Storage& host, int stream) {
  if (is_pinned(host.data())) {
    the_pinned_allocator().record_event(
        host.mutable_data(), host.data_ptr().get_context(), as_stream(stream));
  }
}

void resize(const c10::Storage& storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = device_memory().allocate(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0) {
    void* target = fresh.get();
    const void* source = storage.data();
    push(current(), Work::d2d, [=] { std::memcpy(target, source, kept); });
  }
  storage.set_data_ptr_noswap(std::move(fresh)); // the old memory is freed behind the copy
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

} // namespace emulated
