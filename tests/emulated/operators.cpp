// Operators of the emulated device: one boxed fallback for nearly all of them.
//
// Shapes come from redispatch to Meta, in the caller, where wrong ones raise. Results are allocated
// on the device, and the kernel of the CPU is queued on aliases: CPU tensors over the memory of the
// device that own nothing of it. What Meta cannot tell (data dependent shapes, numbers, an error),
// and what draws random numbers, drains the current stream and runs at once in the caller.
#include <algorithm>
#include <map>
#include <string>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "memory.h"
#include "queues.h"

namespace emulated {

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

Tensor empty_like_geometry(const Tensor& like, c10::Device on) {
  // A result may not overlap itself, as what expand() gives would.
  return like.is_non_overlapping_and_dense()
      ? at::empty_strided(like.sizes(), like.strides(), like.options().device(on))
      : at::empty(like.sizes(), like.options().device(on));
}

// What is done to the bytes when they are read.
void mark_like(c10::TensorImpl* made, const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made->set_wrapped_number(true);
  }
  if (tensor.is_conj()) {
    made->_set_conj(true);
  }
  if (tensor.is_neg()) {
    made->_set_neg(true);
  }
}

// Arguments as another device sees them: Meta (no data), or CPU (the same data, nothing kept alive).
class Aliases {
 public:
  explicit Aliases(c10::DeviceType type) : on_(type) {}

  Tensor operator()(const Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.is_privateuseone()) {
      return alias(tensor);
    }
    if (!tensor.is_cpu()) {
      return tensor;
    }
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (is_number && on_.is_meta()) {
      return tensor; // Meta kernels written in Python take the number out of it
    }
    // A scalar of the host, or indices: read now, as a launch does.
    Tensor copy = on_.is_cpu() ? tensor.clone() : empty_like_geometry(tensor, on_);
    if (is_number) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true); // a Python number: counts less for dtypes
    }
    return copy;
  }

  IValue operator()(const IValue& value) {
    if (value.isTensor()) {
      return (*this)(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : value.toTensorVector()) {
        list.push_back((*this)(one));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& one : value.toOptionalTensorVector()) {
        list.push_back(one ? std::optional<Tensor>((*this)(*one)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      return on_;
    }
    return value;
  }

  Stack operator()(const Stack& values) {
    Stack all;
    for (const IValue& value : values) {
      all.push_back((*this)(value));
    }
    return all;
  }

  // The storage of the device that a result is a view of; none for a result of its own.
  const c10::Storage* base_of(const Tensor& result) const {
    for (const auto& [base, storage] : storages_) {
      if (result.defined() && result.storage().is_alias_of(storage.second)) {
        return &storage.first;
      }
    }
    return nullptr;
  }

 private:
  Tensor alias(const Tensor& tensor) {
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      found = storages_.emplace(key, std::pair(tensor.storage(), alias(tensor.storage()))).first;
    }
    const auto backend = on_.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second.second), c10::DispatchKeySet(backend), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    mark_like(impl, tensor);
    return made;
  }

  c10::Storage alias(const c10::Storage& storage) {
    void* address = on_.is_cpu() ? storage.mutable_data() : nullptr;
    return c10::Storage(
        c10::Storage::use_byte_size_t(), storage.nbytes(), at::DataPtr(address, on_),
        c10::GetAllocator(on_.type()), /*resizable=*/!on_.is_cpu());
  }

  const c10::Device on_;
  // By storage, so that views of one storage stay views of one: overlaps are checked by storage.
  std::map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
};

// Of the CPU, where a failing kernel is told to the caller: neither autograd nor autocast again.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack args)
      : op_(op), schema_(op.schema()), args_(std::move(args)) {
    check_devices();
  }

  Stack run() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), name(),
        " has no kernel of the CPU, which the emulated device would run");
    if (must_run_at_once() || !queue()) {
      run_at_once();
    }
    return std::move(results_);
  }

 private:
  const std::string& name() const {
    return schema_.name();
  }

  void check_devices() const {
    // Indices may be on the host; anything else there must be a scalar.
    if (name().rfind("aten::index", 0) == 0 || name().rfind("aten::_index", 0) == 0) {
      return;
    }
    for (const IValue& value : args_) {
      if (value.isTensor()) {
        check_device(value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& one : value.toTensorVector()) {
          check_device(one);
        }
      }
    }
  }

  void check_device(const Tensor& tensor) const {
    TORCH_CHECK(
        !tensor.defined() || tensor.device() == device() || (tensor.is_cpu() && tensor.dim() == 0),
        "Expected all tensors to be on the same device, but found at least two devices, ", device(),
        " and ", tensor.device(), ", in ", name());
  }

  bool must_run_at_once() const {
    if (op_.hasTag(at::Tag::nondeterministic_seeded) ||
        op_.hasTag(at::Tag::data_dependent_output)) {
      return true;
    }
    if (name() == "aten::index" ? has_mask() : op_.hasTag(at::Tag::dynamic_output_shape)) {
      return true;
    }
    for (const auto& one : schema_.returns()) {
      if (!is_of_tensors(*one.type())) {
        return true;
      }
    }
    return schema_.returns().empty() && !has_written(); // an assertion, say
  }

  static bool is_of_tensors(const c10::Type& type) {
    return type.kind() == c10::TypeKind::TensorType ||
        (type.kind() == c10::TypeKind::ListType &&
         type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType);
  }

  bool has_mask() const {
    for (const auto& one : args_.at(1).toOptionalTensorVector()) {
      if (one && one->defined() &&
          (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte)) {
        return true;
      }
    }
    return false;
  }

  bool queue() {
    Aliases meta(c10::DeviceType::Meta);
    Stack shapes = meta(args_);
    const Stack meta_args = shapes;
    try {
      BelowAutograd guard;
      op_.callBoxed(shapes);
    } catch (...) {
      return false; // the kernel of the CPU says what is wrong, or does what Meta cannot
    }
    resize_outputs(meta_args);
    std::vector<Tensor> fresh; // one for each of the kernel's, undefined where it is not copied
    collect(shapes, [&](const Tensor& like) { return result(like, meta, fresh.emplace_back()); });
    bool has_work = has_written();
    for (const Tensor& one : fresh) {
      has_work = has_work || one.defined();
    }
    if (has_work) {
      queue_kernel(fresh);
    }
    return true;
  }

  void queue_kernel(const std::vector<Tensor>& fresh) {
    Aliases cpu(c10::DeviceType::CPU);
    Stack args = cpu(args_);
    std::vector<Tensor> targets;
    for (const Tensor& one : fresh) {
      targets.push_back(cpu(one));
    }
    push(current(), Work::kernel, [op = op_, args = std::move(args), targets]() mutable {
      op.callBoxed(args);
      const std::vector<Tensor> made = not_written(op.schema(), args);
      for (size_t i = 0; i < targets.size(); ++i) {
        // Of some results Meta knows the shape and the kernel gives none, such as the statistics
        // of a batch_norm in eval(): nobody reads these, and they stay poison.
        if (targets[i].defined() && made.at(i).defined() && made[i].numel() > 0) {
          targets[i].copy_(made[i]);
        }
      }
    });
  }

  static bool is_written(const c10::Argument& one) {
    return one.alias_info() != nullptr && one.alias_info()->isWrite();
  }

  // The tensors that an operator returns, without those that it was given to write to.
  static std::vector<Tensor> not_written(const c10::FunctionSchema& schema, const Stack& values) {
    std::vector<Tensor> all;
    for (size_t i = 0; i < values.size(); ++i) {
      if (is_written(schema.returns().at(i))) {
        continue;
      }
      if (values[i].isTensor()) {
        all.push_back(values[i].toTensor());
      } else if (values[i].isTensorList()) {
        for (const Tensor& one : values[i].toTensorVector()) {
          all.push_back(one);
        }
      }
    }
    return all;
  }

  // Results, from what the operator gave on another device; those of not_written() in their order.
  template <typename F>
  void collect(const Stack& values, F&& of_device) {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto& declared = schema_.returns().at(i);
      if (is_written(declared)) {
        results_.push_back(argument_of(*declared.alias_info()));
      } else if (values[i].isTensor()) {
        results_.push_back(of_device(values[i].toTensor()));
      } else if (values[i].isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& one : values[i].toTensorVector()) {
          list.push_back(of_device(one));
        }
        results_.push_back(list);
      } else {
        results_.push_back(values[i]);
      }
    }
  }

  // A view of an argument, or something fresh.
  static Tensor result(const Tensor& like, const Aliases& aliases, Tensor& fresh) {
    if (!like.defined()) {
      return like;
    }
    if (const c10::Storage* base = aliases.base_of(like)) {
      return view(*base, like);
    }
    fresh = empty_like_geometry(like, device());
    return fresh;
  }

  IValue argument_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto* info = schema_.arguments().at(i).alias_info();
      if (info != nullptr && info->beforeSets() == alias.beforeSets()) {
        return args_[i];
      }
    }
    TORCH_CHECK(false, "which argument does ", name(), " return?");
  }

  static Tensor view(const c10::Storage& base, const Tensor& like) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(base), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    mark_like(impl, like);
    return made;
  }

  bool has_written() const {
    return std::any_of(schema_.arguments().begin(), schema_.arguments().end(), is_written);
  }

  // An out= of another size is resized, as Meta resized its own.
  void resize_outputs(const Stack& meta_args) {
    for (size_t i = 0; i < args_.size(); ++i) {
      if (!is_written(schema_.arguments().at(i))) {
        continue;
      }
      if (args_[i].isTensor()) {
        resize_output(args_[i].toTensor(), meta_args[i].toTensor());
      } else if (args_[i].isTensorList()) {
        const auto outputs = args_[i].toTensorVector();
        const auto like = meta_args[i].toTensorVector();
        for (size_t j = 0; j < outputs.size(); ++j) {
          resize_output(outputs[j], like[j]);
        }
      }
    }
  }

  static void resize_output(const Tensor& output, const Tensor& like) {
    if (!output.defined() || output.sizes() == like.sizes()) {
      return;
    }
    output.resize_(like.sizes());
    output.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  }

  void run_at_once() {
    synchronize(current());
    Aliases cpu(c10::DeviceType::CPU);
    Stack values = cpu(args_);
    {
      BelowAutograd guard;
      op_.callBoxed(values);
    }
    collect(values, [&](const Tensor& value) { return brought(value, cpu); });
  }

  // The stream is drained: what was computed on the host may be written at once.
  static Tensor brought(const Tensor& value, const Aliases& cpu) {
    Tensor fresh;
    Tensor made = result(value, cpu, fresh);
    if (fresh.defined()) {
      synchronize(current()); // its memory may still be poisoned
      Aliases target(c10::DeviceType::CPU);
      BelowAutograd guard;
      target(fresh).copy_(value);
    }
    return made;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const Stack args_;
  Stack results_;
};

// Where an operator runs: where its first tensor of a device is, or where it is told to make one.
c10::Device device_for(const Stack& args) {
  std::optional<c10::Device> told;
  for (const IValue& value : args) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
      return value.toTensor().device();
    }
    if (value.isTensorList()) {
      for (const Tensor& one : value.toTensorVector()) {
        if (one.defined() && one.is_privateuseone()) {
          return one.device();
        }
      }
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      told = value.toDevice();
    }
  }
  return told && told->has_index() ? *told : device();
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num = op.schema().arguments().size();
  Stack args(stack->end() - num, stack->end());
  const c10::DeviceGuard guard(device_for(args));
  Stack results = Call(op, std::move(args)).run();
  torch::jit::drop(*stack, num);
  for (IValue& one : results) {
    stack->push_back(std::move(one));
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  run(op, stack);
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// PyTorch gives these names to the convolution of a device it does not know; arguments are the same.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  static const auto op = find("aten::convolution");
  run(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  static const auto op = find("aten::convolution_backward");
  auto args = stack->end() - 10; // grad, input, weight, 3 geometries, transposed, padding, groups, mask
  const Tensor weight = args[2].toTensor();
  const bool is_transposed = args[6].toBool();
  const int64_t num = is_transposed ? weight.size(1) * args[8].toInt() : weight.size(0);
  stack->insert(args + 3, IValue(std::vector<int64_t>{num})); // the sizes of the bias
  run(op, stack);
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> on, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> on, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only memory of the host can be pinned");
  const c10::OptionalDeviceGuard guard(on);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor borrowed(const Tensor& tensor) {
  Aliases cpu(c10::DeviceType::CPU);
  return cpu(tensor);
}

// A tensor of the host over the same memory, which a queued copy does not keep alive either.
Tensor borrowed_of_host(const Tensor& tensor) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      at::DataPtr(const_cast<void*>(tensor.storage().data()), c10::Device(c10::kCPU)), nullptr,
      false);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  mark_like(impl, tensor);
  return made;
}

void queue_copy(Work kind, Tensor target, Tensor source) {
  push(current(), kind, [target, source]() mutable { target.copy_(source); });
}

void copy_to_host(const Tensor& target, const Tensor& source, bool non_blocking) {
  const c10::DeviceGuard guard(source.device());
  queue_copy(Work::d2h, borrowed_of_host(target), borrowed(source));
  if (non_blocking && is_pinned(target.storage().data())) {
    note_use(target.storage(), current());
  } else {
    synchronize(current()); // pageable memory: CUDA returns when the copy is done
  }
}

void copy_from_host(const Tensor& target, const Tensor& source, bool non_blocking) {
  const c10::DeviceGuard guard(target.device());
  const bool is_plain = source.scalar_type() == target.scalar_type() && source.is_contiguous();
  if (is_pinned(source.storage().data()) && is_plain) {
    queue_copy(Work::h2d, borrowed(target), borrowed_of_host(source));
    note_use(source.storage(), current());
  } else {
    // Pageable memory is read before the call returns, and so is what is converted on the way.
    Tensor staged = source.to(target.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    queue_copy(Work::h2d, borrowed(target), staged.contiguous());
  }
  if (!non_blocking) {
    synchronize(current());
  }
}

// On the stream of the source, behind what the target's has queued; and that goes on behind it.
void copy_on_device(const Tensor& target, const Tensor& source) {
  const int from = current(source.device().index()), to = current(target.device().index());
  const c10::DeviceGuard guard(source.device());
  if (from != to) {
    wait_for(from, record(to));
  }
  queue_copy(Work::d2d, borrowed(target), borrowed(source));
  if (from != to) {
    wait_for(to, record(from));
  }
}

Tensor& copy_(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.is_same(given)) {
    return self;
  }
  BelowAutograd guard;
  const Tensor source = given.expand(self.sizes());
  if (self.numel() == 0) {
    return self;
  }
  if (self.is_cpu()) {
    copy_to_host(self, source, non_blocking);
  } else if (source.is_cpu()) {
    copy_from_host(self, source, non_blocking);
  } else {
    copy_on_device(self, source);
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor written = target;
  return copy_(written, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  synchronize(current(self.device().index()));
  return at::native::_local_scalar_dense_cpu(borrowed(self));
}

void grow(const Tensor& tensor) {
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.numel() > 0 && needed > tensor.storage().nbytes()) {
    resize(tensor.storage(), needed);
  }
}

const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  grow(self);
  return self;
}

Tensor& set_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto num = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {num}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage_offset(
      self,
      c10::Storage(
          c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(),
          true),
      0, {0}, {1});
}

void record_stream(Tensor& self, at::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // These have a kernel of the CPU beside one made of other operators, whose bits may be others.
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "native_channel_shuffle", "silu_backward",
        "mish_backward", "addr", "addr.out", "linalg__powsum"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

} // namespace emulated
