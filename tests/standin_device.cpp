// A stand-in for an accelerator: a torch device in host memory that behaves as badly as a GPU may.
//
// - Its memory is closed to the host (PROT_NONE) but for the length of an operator: who touches it dies.
// - New memory is NaN (0xff), freed memory is unmapped.
// - Copies that need not block happen as late as they may: on a side stream when something waits for a later event of it, and
//   from the device's own stream into host memory, which reads NaN until then. What is freed before is a hazard, counted.
// - Operators on tensors of the host and of the device are refused. All run on the host, so digits are the host's.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kCapacity = size_t(4) << 30;
const c10::Device kDevice(kType, 0);

// ---- memory ----

struct Block {
  size_t nbytes;
  int open = 0;             // operators that use it now
  int pending = 0;          // copies that will
  bool is_recorded = false; // by record_stream, for those copies
  bool is_freed = false;    // while copies are pending
};

std::recursive_mutex lock;
std::map<char*, Block> blocks;
size_t held = 0, peak = 0;
int64_t hazards = 0, deferred = 0;

void unmap(std::map<char*, Block>::iterator block) {
  held -= block->second.nbytes;
  munmap(block->first, block->second.nbytes);
  blocks.erase(block);
}

std::map<char*, Block>::iterator block_of(const void* address) {
  auto after = blocks.upper_bound((char*)address);
  TORCH_INTERNAL_ASSERT(after != blocks.begin(), "no memory of the device");
  auto block = std::prev(after);
  TORCH_INTERNAL_ASSERT((char*)address < block->first + block->second.nbytes, "no memory of the device");
  return block;
}

void release(void* address) {
  if (!address) return;
  std::lock_guard guard(lock);
  auto block = blocks.find((char*)address);
  if (block->second.pending == 0) return unmap(block);
  // torch's allocators would hand it out again: only record_stream keeps it for a stream that is not its own.
  hazards += !block->second.is_recorded;
  block->second.is_freed = true;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &release, kDevice};
    std::lock_guard guard(lock);
    const size_t page = sysconf(_SC_PAGESIZE), mapped = (nbytes + page - 1) / page * page;
    TORCH_CHECK_WITH(OutOfMemoryError, held + mapped <= kCapacity, "out of memory on the stand-in device");
    auto address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "mmap failed");
    memset(address, 0xff, mapped);
    mprotect(address, mapped, PROT_NONE);
    blocks[(char*)address] = {mapped};
    held += mapped;
    peak = std::max(peak, held);
    return {address, address, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { default_copy_data(target, source, nbytes); }
};

Memory memory;

// Opens blocks to the host for as long as it lives.
class Opened {
 public:
  ~Opened() {
    std::lock_guard guard(lock);
    for (char* address : addresses_) {
      auto block = blocks.find(address);
      if (--block->second.open == 0) mprotect(address, block->second.nbytes, PROT_NONE);
    }
  }
  void add(const at::Tensor& tensor) {
    if (tensor.device().type() == kType && tensor.storage().nbytes()) add(tensor.storage().data());
  }
  void add(const void* address) {
    std::lock_guard guard(lock);
    auto block = block_of(address);
    if (block->second.open++ == 0) mprotect(block->first, block->second.nbytes, PROT_READ | PROT_WRITE);
    addresses_.push_back(block->first);
  }

 private:
  std::vector<char*> addresses_;
};

// The same memory as a host tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  TORCH_CHECK(end <= tensor.storage().nbytes(), "reads ", end, " bytes of a storage of ", tensor.storage().nbytes());
  auto start = (char*)tensor.storage().data() + tensor.storage_offset() * tensor.element_size();
  return at::from_blob(start, tensor.sizes(), tensor.strides(), options);
}

// Host memory of torch's own allocator, and where it is.
struct Pinned final : c10::Allocator {
  static std::set<void*>& addresses() {
    static std::set<void*> all;
    return all;
  }
  static void release(void* address) {
    std::lock_guard guard(lock);
    addresses().erase(address);
    free(address);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    std::lock_guard guard(lock);
    auto address = malloc(std::max<size_t>(nbytes, 1));
    addresses().insert(address);
    return {address, address, &release, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { default_copy_data(target, source, nbytes); }
};

Pinned pinned;

// ---- streams ----

struct Copy {
  at::Tensor source, target;    // host tensors
  std::vector<char*> addresses; // of the blocks behind them
};

struct Stream {
  std::deque<Copy> copies;
  int64_t queued = 0, done = 0;
};

struct Event {
  int64_t stream, reached_after;
};

thread_local c10::StreamId current = 0; // 0 is the device's own: what it is asked happens at once
std::map<int64_t, Stream> streams;

void advance(int64_t id, int64_t up_to) {
  std::lock_guard guard(lock);
  auto& stream = streams[id];
  for (; stream.done < up_to; ++stream.done) {
    Copy copy = std::move(stream.copies.front());
    stream.copies.pop_front();
    Opened opened;
    for (char* address : copy.addresses) opened.add(address);
    {
      at::NoGradGuard no_grad;
      copy.target.copy_(copy.source);
    }
    for (char* address : copy.addresses) --blocks.find(address)->second.pending;
  }
  for (auto block = blocks.begin(); block != blocks.end();) {
    auto next = std::next(block);
    if (block->second.pending == 0 && block->second.open == 0) {
      block->second.is_recorded = false;
      if (block->second.is_freed) unmap(block);
    }
    block = next;
  }
}

void advance(int64_t id) { advance(id, streams[id].queued); }

// Copies into memory that is not pinned block on a GPU. What a page or more holds counts as pinned, whoever would have pinned it.
bool blocks_the_host(const at::Tensor& target) { return target.nbytes() < 4096 && !target.is_pinned(); }

bool defer(const at::Tensor& source, const at::Tensor& target) {
  const bool to_host = target.device().is_cpu();
  if (target.numel() == 0 || (to_host ? blocks_the_host(target) : current == 0)) return false;
  std::lock_guard guard(lock);
  Opened opened;
  opened.add(source);
  opened.add(target);
  Copy copy{on_host(source), on_host(target), {}};
  // On the device's own stream nothing that is asked later changes what it reads.
  if (current == 0) copy.source = copy.source.clone();
  else if (!source.device().is_cpu()) copy.addresses.push_back(block_of(source.storage().data())->first);
  if (!to_host) copy.addresses.push_back(block_of(target.storage().data())->first);
  for (char* address : copy.addresses) ++blocks.find(address)->second.pending;
  if (to_host && target.is_contiguous()) memset(target.data_ptr(), 0xff, target.nbytes());
  auto& stream = streams[current];
  stream.copies.push_back(std::move(copy));
  ++stream.queued;
  ++deferred;
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard guard(lock);
    static c10::StreamId last = 0;
    return stream(++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& at, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard guard(lock);
    if (!*event) *event = new Event();
    *(Event*)*event = {at.id(), streams[at.id()].queued};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void block(void* event, const c10::Stream&) const override {
    if (event && ((Event*)event)->stream != 0) synchronizeEvent(event);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard guard(lock);
    return !event || streams[((Event*)event)->stream].done >= ((Event*)event)->reached_after;
  }
  void synchronizeEvent(void* event) const override {
    if (event) advance(((Event*)event)->stream, ((Event*)event)->reached_after);
  }
  bool queryStream(const c10::Stream& of) const override {
    std::lock_guard guard(lock);
    return streams[of.id()].done >= streams[of.id()].queued;
  }
  void synchronizeStream(const c10::Stream& of) const override { advance(of.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard guard(lock);
    for (auto& [id, stream] : streams) advance(id, stream.queued);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- operators ----

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (non_blocking && defer(source, target)) return target;
  if (current != 0) advance(current);
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
  advance(0);
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

void record_stream(at::Tensor& tensor, c10::Stream) {
  std::lock_guard guard(lock);
  if (tensor.storage().nbytes()) block_of(tensor.storage().data())->second.is_recorded = true;
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

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (current != 0) advance(current);
  bool here = false, there = false;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    (tensor.device().type() == kType ? there : here) |= tensor.device().type() == kType || tensor.dim() > 0;
  };
  for (auto value = stack->end() - op.schema().arguments().size(); value != stack->end(); ++value) {
    if (value->isTensor()) look(value->toTensor());
    if (value->isTensorList())
      for (const at::Tensor& tensor : value->toTensorList()) look(tensor);
  }
  TORCH_CHECK(!(here && there), "Expected all tensors to be on the same device: ", op.schema().name());
  at::native::cpu_fallback(op, stack, true);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard guard(lock);
    return Pinned::addresses().count(const_cast<void*>(address));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto impl = storage.unsafeGetStorageImpl();
    auto fresh = memory.allocate(nbytes);
    if (auto kept = std::min(nbytes, impl->nbytes())) {
      Opened opened;
      opened.add(impl->data());
      opened.add(fresh.get());
      memcpy(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_whole_);
  library.impl("set_.source_Storage_storage_offset", &set_);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::SetAllocator(kType, &memory);
  module.attr("CAPACITY") = kCapacity;
  module.def("held", [] { return held; });
  module.def("peak", [] { return peak; });
  module.def("hazards", [] { return hazards; });
  module.def("deferred", [] { return deferred; });
}
