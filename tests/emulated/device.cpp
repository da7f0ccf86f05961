// An accelerator made of threads: what PyTorch asks of a device, and the module for Python.
#include <Python.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "queues.h"

namespace emulated {

namespace {

// An event is the last mark it was recorded as: who waited for an earlier one still does.
struct Event {
  std::mutex mutex;
  MarkPtr mark;
  bool has_time = false;

  MarkPtr last() {
    std::lock_guard<std::mutex> guard(mutex);
    return mark;
  }
};

Event& event_of(void* event) {
  return *static_cast<Event*>(event);
}

int number_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    return emulated::device(to.has_index() ? exchange_device(to.index()) : current_device());
  }
  c10::Device getDevice() const override {
    return device();
  }
  void setDevice(c10::Device to) const override {
    exchangeDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    exchangeDevice(to);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return NUM_DEVICES;
  }

  c10::Stream getStream(c10::Device of) const override {
    return as_stream(current(number_of(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return as_stream(default_stream(number_of(of)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return as_stream(next_of_pool(number_of(of)));
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return as_stream(next_of_pool(number_of(of)));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return as_stream(exchange_current(id_of(to)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(id_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(id_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    synchronize_device(index < 0 ? current_device() : index);
  }

  void record(
      void** event, const c10::Stream& stream, c10::DeviceIndex,
      c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event();
      event_of(*event).has_time = flag == c10::EventFlag::BACKEND_DEFAULT;
    }
    std::lock_guard<std::mutex> guard(event_of(*event).mutex);
    event_of(*event).mark = emulated::record(id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(id_of(stream), event_of(event).last());
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || event_of(event).last()->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      await(*event_of(event).last());
      throw_failure();
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "both events must be recorded");
    TORCH_CHECK(
        event_of(first).has_time && event_of(second).has_time,
        "both events must be made with enable_timing=True");
    const MarkPtr from = event_of(first).last(), to = event_of(second).last();
    TORCH_CHECK(from->is_set() && to->is_set(), "both events must have happened: synchronize first");
    return std::chrono::duration<double, std::milli>(to->when() - from->when()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return NUM_DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  // One generator for the host and the device: the same seed gives the same bits on both.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    return device_at(address);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize(storage, nbytes);
  }
};

const bool are_hooks_registered [[maybe_unused]] = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A task that stops its stream until Python lets it go on.
class Gate {
 public:
  explicit Gate(int stream) : released_(std::make_shared<Mark>()) {
    wait_for(stream, released_);
  }
  ~Gate() {
    release(); // a test that failed leaves no stream stopped
  }
  void release() {
    if (!released_->is_set()) {
      released_->set();
    }
  }

 private:
  const MarkPtr released_;
};

} // namespace

} // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  namespace py = pybind11;
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate")
      .def("release", &Gate::release)
      .def("__enter__", [](std::shared_ptr<Gate> self) { return self; })
      .def("__exit__", [](Gate& self, const py::args&) { self.release(); });
  m.def("hold", [](int stream) { return std::make_shared<Gate>(stream); });
  m.def("set_delays", [](int64_t kernel, int64_t h2d, int64_t d2h, int64_t jitter, uint64_t seed) {
    set_delays({kernel, h2d, d2h, jitter, seed});
  });
  m.def("device_count", [] { return NUM_DEVICES; });
  m.def("synchronize", &synchronize_all);
}
