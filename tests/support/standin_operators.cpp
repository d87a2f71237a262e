// The operators of the stand-in device, and what torch asks of its module: see standin_device.cpp.
#include "standin_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <map>

namespace standin {

// Host memory of torch's own allocator, and where it is.
struct Pinned final : c10::Allocator {
  static std::map<char*, size_t>& blocks() {
    static std::map<char*, size_t> all;
    return all;
  }
  static void release(void* address) {
    trace("unpin", "", "torch", {{uint64_t(address), uint64_t(address) + 1, true}});
    Locked guard;
    auto block = blocks().find((char*)address);
    note_pinned(-block->second);
    blocks().erase(block);
    free(address);
  }
  // As CUDA's, a power of two.
  c10::DataPtr allocate(size_t nbytes) override {
    size_t taken = 1;
    while (taken < nbytes) taken *= 2;
    auto address = malloc(taken);
    trace("pin", "", "torch", {{uint64_t(address), uint64_t(address) + taken, true}});
    Locked guard;
    blocks()[(char*)address] = taken;
    note_pinned(taken);
    return {address, address, &release, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { default_copy_data(target, source, nbytes); }
};

Pinned pinned;

std::map<char*, size_t> registered;

bool is_in(const std::map<char*, size_t>& blocks, const void* address) {
  auto after = blocks.upper_bound((char*)address);
  if (after == blocks.begin()) return false;
  auto block = std::prev(after);
  return (char*)address < block->first + block->second;
}

bool is_pinned(const void* address) {
  Locked guard;
  return is_in(Pinned::blocks(), address) || is_in(registered, address);
}

// As CUDA's calls of these names, which make a context on the device that is current.
int host_register(int64_t address, int64_t nbytes, int) {
  touch(current_device);
  trace("pin", "", "", {{uint64_t(address), uint64_t(address + nbytes), true}});
  Locked guard;
  TORCH_CHECK(registered.emplace((char*)address, nbytes).second, "memory that is pinned already");
  note_pinned(nbytes);
  return 0;
}

int host_unregister(int64_t address) {
  touch(current_device);
  trace("unpin", "", "", {{uint64_t(address), uint64_t(address) + 1, true}});
  Locked guard;
  auto block = registered.find((char*)address);
  TORCH_CHECK(block != registered.end(), "memory that is not pinned");
  note_pinned(-block->second);
  registered.erase(block);
  return 0;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device ? index_of(*device) : current_device);
  return at::detail::empty_generic(size, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device ? index_of(*device) : current_device);
  return at::detail::empty_strided_generic(size, stride, memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::NoGradGuard no_grad;
  const auto device = source.device().type() == kType ? source.device().index() : target.device().index();
  const auto stream = current_stream(device);
  touch(device);
  const bool down = target.device().is_cpu(), crosses = down || source.device().is_cpu();
  const bool waits = target.numel() && crosses && (!non_blocking || (down && !is_pinned(target.data_ptr())));
  if (waits) note_wait(down ? "a copy to the host" : "a copy from the host");
  if (crosses && !computing) time_copy(stream, down, target.nbytes(), waits);
  if (tracing && !computing) {
    std::vector<Access> accesses;
    note_access(accesses, source, false);
    note_access(accesses, target, true);
    trace("do", name_of(stream), "", std::move(accesses), "copy");
    if (waits) trace("join", "", name_of(stream));
  }
  if (non_blocking && defer(source, target, stream)) return target;
  settle(stream);
  if (target.device().type() == kType && target.device().index() != device) settle(current_stream(target.device().index()));
  Computing computing;
  Opened opened;
  opened.add(source);
  opened.add(target);
  if (target.numel()) on_host(target).copy_(on_host(source).expand(target.sizes()));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& tensor) {
  note_wait("a value");
  const auto stream = name_of(current_stream(tensor.device().index()));
  std::vector<Access> accesses;
  note_access(accesses, tensor, false);
  trace("do", stream, "", std::move(accesses), "item");
  trace("join", "", stream);
  touch(tensor.device().index());
  settle(current_stream(tensor.device().index()));
  advance(current_stream(tensor.device().index()));
  wait_until(end_of(current_stream(tensor.device().index())), "a value");
  Opened opened;
  opened.add(tensor);
  return on_host(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto needed = at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor& set_(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

at::Tensor& set_whole_(at::Tensor& tensor, at::Storage storage) {
  c10::SymInt numel = int64_t(storage.nbytes() / tensor.element_size());
  return set_(tensor, std::move(storage), 0, c10::SymIntArrayRef(&numel, 1), {});
}

void note_record_stream(at::Tensor& tensor, c10::Stream stream) {
  const auto begin = uint64_t(tensor.storage().data());
  trace("keep", name_of({stream.device_index(), stream.id()}), "", {{begin, begin + 1, false}});
  record_stream(tensor);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// A tensor of the host may become one of the device by its `data`, as on CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor&) { return true; }

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  time_launch();
  Excluded excluded;
  bool here = false;
  std::set<c10::DeviceIndex> there;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kType) there.insert(tensor.device().index());
    else here |= tensor.dim() > 0;
  };
  for (auto value = stack->end() - op.schema().arguments().size(); value != stack->end(); ++value) {
    if (value->isTensor()) look(value->toTensor());
    if (value->isTensorList())
      for (const at::Tensor& tensor : value->toTensorList()) look(tensor);
  }
  TORCH_CHECK(here + there.size() <= 1, "Expected all tensors to be on the same device: ", op.schema().name());
  OnDevice on(there.empty() ? current_device : *there.begin());
  touch(current_device);
  settle(current_stream(current_device));
  std::vector<Access> accesses;
  const auto on_a_device = [](const at::Tensor& tensor) { return tensor.device().type() == kType; };
  if (tracing) note_values(accesses, stack->end() - op.schema().arguments().size(), op.schema().arguments(), false, on_a_device);
  {
    // What the fallback copies, a device would not.
    Computing computing;
    at::native::cpu_fallback(op, stack, true);
  }
  if (!tracing) return;
  note_values(accesses, stack->end() - op.schema().returns().size(), op.schema().returns(), true, on_a_device);
  trace("do", name_of(current_stream(current_device)), "", std::move(accesses), op.schema().name());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return contexts.count(device); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    if (device < 0) return device;
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void* address) const override { return {kType, device_of(address)}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto impl = storage.unsafeGetStorageImpl();
    OnDevice on(storage.device().index());
    settle(current_stream(current_device));
    auto fresh = memory()->allocate(nbytes);
    if (auto kept = std::min(nbytes, impl->nbytes())) {
      trace("do", name_of(current_stream(current_device)), "", {{uint64_t(impl->data()), uint64_t(impl->data()) + kept, false}}, "resize");
      Opened opened;
      opened.add(impl->data());
      opened.add(fresh.get());
      memcpy(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

} // namespace standin

using namespace standin;

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_whole_);
  library.impl("set_.source_Storage_storage_offset", &set_);
  library.impl("record_stream", &note_record_stream);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  library.impl("_reshape_alias", &reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

// Under autocast, what computes most of a transformer does so in 16 bits.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::SetAllocator(kType, memory());
  module.attr("CAPACITY") = kCapacity;
  module.attr("DEVICES") = kDevices;
  module.def("held", [] { return held; });
  module.def("peak", [] { return peak; });
  module.def("hazards", [] { return hazards; });
  module.def("waits", [] { return waits; });
  module.def("pinned", [] { return pinned_bytes; });
  module.def("most_pinned", [] { return most_pinned_bytes; });
  module.def("deferred", [] { return deferred; });
  module.def("timed_events", [] { return timed_events; });
  module.def("contexts", [] { return contexts; });
  module.def("keep_to", [](int device) { only_device = device; });
  module.def("keep_freed", &keep_freed);
  module.def("host_register", &host_register);
  module.def("host_unregister", &host_unregister);
  define_communicator(module);
  define_trace(module);
  define_clock(module);
}
