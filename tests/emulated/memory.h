// Memory of the emulated device, and pinned memory of the host beside it.
#pragma once

#include <cstddef>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

namespace emulated {

constexpr unsigned char POISON = 0xFF; // NaN as a float, -1 as an integer

c10::Device device(int index);
// The current one.
c10::Device device();
// That of a block which begins at this address.
c10::Device device_at(void* address);
c10::Stream as_stream(int stream);
int id_of(const c10::Stream& stream);

c10::DeviceAllocator* device_allocator();
at::HostAllocator* pinned_allocator();
bool is_pinned(const void* address);
// A queued copy uses this host memory: pinned memory is not given out again before it has run.
void note_use(const c10::Storage& host, int stream);
// Move a storage of the device to new memory of another size, in the order of the current stream.
void resize(const c10::Storage& storage, size_t nbytes);

} // namespace emulated
