// A stand-in for an accelerator: a torch device in host memory that behaves as badly as a GPU may.
//
// - There are several, and each thread has a current one, which is the first until it says otherwise.
// - Its memory is closed to the host (PROT_NONE) but for the length of an operator: who touches it dies.
// - New memory is NaN (0xff), freed memory is unmapped, or kept for later requests as by torch's allocator of CUDA memory.
// - Copies that need not block happen as late as they may: on a side stream when something waits for a later event of it, and
//   from the device's own stream into host memory, which reads NaN until then. What is freed before is a hazard, noted.
// - A stream may be held up, by a collective (standin_communicator.cpp). The host is not, before it asks that stream for more.
// - Operators on tensors of the host and of the device, or of two devices, are refused. All run on the host, so digits are
//   the host's.
// - Where the host waits for a device, and how much host memory is locked for copies, is noted.
// - Who uses which memory, in which order, can be traced (standin_trace.cpp).
// - When a device with slower or faster links would have done its work can be computed (standin_clock.cpp).
// - What would make a context on a device (500 MB on a GPU) is noted, and refused on devices that a process is to keep off.
#include "standin_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <map>

namespace standin {

// ---- memory ----

struct Block {
  StreamKey stream; // that was current at the request
  size_t nbytes;
  bool is_guarded;          // no access but by operators
  int open = 0;             // operators that use it now
  int pending = 0;          // copies that will
  bool is_recorded = false; // by record_stream, for those copies
  bool is_freed = false;    // while copies are pending
};

std::recursive_mutex lock;
std::map<char*, Block> blocks;
size_t held = 0, peak = 0;
// Freed blocks, by stream and size, which are given out again, the lowest address first.
bool keeps_freed = false;
std::map<std::pair<StreamKey, size_t>, std::set<char*>> kept;
int64_t deferred = 0;
std::vector<std::string> hazards;

void note_hazard(const std::string& what) {
  Locked guard;
  hazards.push_back(what);
}

std::vector<std::pair<int, std::string>> waits;

thread_local int computing = 0;
int64_t timed_events = 0;

Computing::Computing() { ++computing; }
Computing::~Computing() { --computing; }

void note_wait(const std::string& what) {
  if (computing) return;
  Locked guard;
  waits.emplace_back(gettid(), what);
}

size_t pinned_bytes = 0, most_pinned_bytes = 0;

void note_pinned(size_t nbytes) {
  Locked guard;
  pinned_bytes += nbytes;
  most_pinned_bytes = std::max(most_pinned_bytes, pinned_bytes);
}

// ---- devices ----

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{}; // 0 is a device's own: what it is asked happens at once

std::set<int> contexts;
int only_device = -1;

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

void touch(c10::DeviceIndex device) {
  Locked guard;
  TORCH_CHECK(only_device < 0 || device == only_device, "a context would be made on device ", int(device),
              ", and this process is to keep to device ", only_device);
  contexts.insert(device);
}

// ---- memory of a device ----

void unmap(std::map<char*, Block>::iterator block) {
  if (keeps_freed) {
    block->second.is_recorded = block->second.is_freed = false;
    kept[{block->second.stream, block->second.nbytes}].insert(block->first);
    return;
  }
  held -= block->second.nbytes;
  munmap(block->first, block->second.nbytes);
  blocks.erase(block);
}

void keep_freed(bool keeps) {
  Locked guard;
  keeps_freed = keeps;
  for (auto& [_, addresses] : std::exchange(kept, {}))
    for (char* address : addresses) unmap(blocks.find(address));
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
  Excluded excluded;
  trace("free", "", "", {{uint64_t(address), uint64_t(address) + 1, true}});
  Locked guard;
  auto block = blocks.find((char*)address);
  if (block->second.pending == 0) return unmap(block);
  // torch's allocators would hand it out again: only record_stream keeps it for a stream that is not its own.
  if (!block->second.is_recorded) note_hazard("memory of a copy under way was freed");
  block->second.is_freed = true;
}

// Memory of the device, and whether it is new.
std::pair<char*, bool> map(size_t nbytes) {
  Excluded excluded;
  Locked guard;
  const size_t page = sysconf(_SC_PAGESIZE), mapped = (nbytes + page - 1) / page * page;
  const auto stream = current_stream(current_device);
  if (const auto free = kept.find({stream, mapped}); free != kept.end() && !free->second.empty())
    return {free->second.extract(free->second.begin()).value(), false};
  TORCH_CHECK_WITH(OutOfMemoryError, held + mapped <= kCapacity, "out of memory on the stand-in device");
  auto address = (char*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "mmap failed");
  memset(address, 0xff, mapped);
  // While a trace is kept, the trace tells who uses the memory: to close it costs a fifth of the time.
  const bool is_guarded = !tracing && !timing;
  if (is_guarded) mprotect(address, mapped, PROT_NONE);
  blocks[address] = {stream, mapped, is_guarded};
  held += mapped;
  peak = std::max(peak, held);
  return {address, true};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kType, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &release, device};
    touch(current_device);
    const auto [address, is_new] = map(nbytes);
    trace("allocate", name_of(current_stream(current_device)), "", {{uint64_t(address), uint64_t(address) + nbytes, true}},
          is_new ? "" : "kept");
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { default_copy_data(target, source, nbytes); }
};

c10::Allocator* memory() {
  static Memory only;
  return &only;
}

c10::DeviceIndex device_of(const void* address) {
  Locked guard;
  return block_of(address)->second.stream.first;
}

void record_stream(const at::Tensor& tensor) {
  Locked guard;
  if (tensor.storage().nbytes()) block_of(tensor.storage().data())->second.is_recorded = true;
}

Opened::~Opened() {
  Locked guard;
  for (char* address : addresses_) {
    auto block = blocks.find(address);
    if (--block->second.open == 0 && block->second.is_guarded) mprotect(address, block->second.nbytes, PROT_NONE);
  }
}

void Opened::add(const at::Tensor& tensor) {
  if (tensor.device().type() == kType && tensor.storage().nbytes()) add(tensor.storage().data());
}

void Opened::add(const void* address) {
  Locked guard;
  auto block = block_of(address);
  if (block->second.open++ == 0 && block->second.is_guarded) mprotect(block->first, block->second.nbytes, PROT_READ | PROT_WRITE);
  addresses_.push_back(block->first);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  TORCH_CHECK(end <= tensor.storage().nbytes(), "reads ", end, " bytes of a storage of ", tensor.storage().nbytes());
  auto start = (char*)tensor.storage().data() + tensor.storage_offset() * tensor.element_size();
  return at::from_blob(start, tensor.sizes(), tensor.strides(), options);
}

// ---- streams ----

struct Copy {
  at::Tensor source, target;    // host tensors
  std::vector<char*> addresses; // of the blocks behind them
};

// A copy, or what is waited for.
struct Entry {
  std::optional<Copy> copy;
  std::shared_ptr<Hold> hold;
};

struct Stream {
  std::recursive_mutex running;
  std::deque<Entry> entries;
  int64_t queued = 0, done = 0;
  Holds holds; // of those in the queue; what runs at once does not look there
};

struct Event {
  std::string id;
  StreamKey stream;
  int64_t reached_after;
  Holds holds;
  double time;       // at which it is reached
  std::string label; // of the last copy before it
};

std::map<StreamKey, Stream> streams;
std::vector<std::weak_ptr<Hold>> all_holds;

StreamKey current_stream(c10::DeviceIndex device) { return {device, current_streams[device]}; }

std::string name_of(StreamKey stream) { return c10::str("stream ", int(stream.first), ".", stream.second); }

Stream& stream_at(StreamKey key) {
  Locked guard;
  return streams[key];
}

void make(Copy copy) {
  Locked guard;
  Computing computing;
  Opened opened;
  for (char* address : copy.addresses) opened.add(address);
  {
    c10::AutoGradMode without(false);
    copy.target.copy_(copy.source);
  }
  for (char* address : copy.addresses) --blocks.find(address)->second.pending;
}

void unmap_freed() {
  Locked guard;
  for (auto block = blocks.begin(); block != blocks.end();) {
    auto next = std::next(block);
    if (block->second.pending == 0 && block->second.open == 0) {
      block->second.is_recorded = false;
      if (block->second.is_freed) unmap(block);
    }
    block = next;
  }
}

// Without the lock: a hold waits for what other threads do.
void advance(StreamKey key, int64_t up_to) {
  WithoutPython waiting;
  auto& stream = stream_at(key);
  std::lock_guard one_at_a_time(stream.running);
  while (true) {
    Entry entry;
    {
      Locked guard;
      if (stream.done >= up_to) break;
      entry = std::move(stream.entries.front());
      stream.entries.pop_front();
    }
    if (entry.hold) entry.hold->settle();
    if (entry.copy) make(std::move(*entry.copy));
    Locked guard;
    ++stream.done;
  }
  unmap_freed();
}

int64_t queued_on(StreamKey key) {
  Locked guard;
  return streams[key].queued;
}

void advance(StreamKey key) { advance(key, queued_on(key)); }

void push(StreamKey key, Entry entry) {
  Locked guard;
  auto& stream = streams[key];
  if (entry.hold && key.second == 0) stream.holds.push_back(entry.hold);
  stream.entries.push_back(std::move(entry));
  ++stream.queued;
}

void hold_up_current_stream(c10::DeviceIndex device, const std::shared_ptr<Hold>& hold) {
  push(current_stream(device), {std::nullopt, hold});
}

void note_hold(const std::shared_ptr<Hold>& hold) {
  Locked guard;
  all_holds.push_back(hold);
}

// What runs at once on a stream waits for what that is held up by.
void settle(StreamKey key) {
  if (key.second != 0) return advance(key);
  Holds holds;
  {
    Locked guard;
    holds.swap(streams[key].holds);
  }
  for (auto& hold : holds) hold->settle();
}

// Copies into memory that is not pinned block on a GPU. What a page or more holds counts as pinned, whoever would have pinned it.
bool blocks_the_host(const at::Tensor& target) { return target.nbytes() < 4096 && !target.is_pinned(); }

bool defer(const at::Tensor& source, const at::Tensor& target, StreamKey key) {
  const bool to_host = target.device().is_cpu(), at_once = key.second == 0;
  if (tracing || target.numel() == 0 || (to_host ? blocks_the_host(target) : at_once)) return false;
  if (at_once) settle(key);
  Excluded excluded;
  Locked guard;
  Opened opened;
  opened.add(source);
  opened.add(target);
  Copy copy{on_host(source), on_host(target), {}};
  // On the device's own stream nothing that is asked later changes what it reads.
  if (at_once) copy.source = copy.source.clone();
  else if (!source.device().is_cpu()) copy.addresses.push_back(block_of(source.storage().data())->first);
  if (!to_host) copy.addresses.push_back(block_of(target.storage().data())->first);
  for (char* address : copy.addresses) ++blocks.find(address)->second.pending;
  if (to_host && target.is_contiguous()) memset(target.data_ptr(), 0xff, target.nbytes());
  push(key, {std::move(copy), nullptr});
  ++deferred;
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kType, current_device);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(index_of(device) < kDevices, "there is no device ", int(device.index()));
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  static c10::Stream stream(StreamKey key) { return c10::Stream(c10::Stream::UNSAFE, {kType, key.first}, key.second); }
  static StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  c10::Stream getStream(c10::Device device) const override { return stream(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream({index_of(device), 0}); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    touch(index_of(device));
    Locked guard;
    static c10::StreamId last = 0;
    return stream({index_of(device), ++last});
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream(next.device_index()));
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& at, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    static std::atomic<int64_t> ids{0};
    const auto id = c10::str("event ", ++ids);
    touch(at.device_index());
    trace("give", name_of(key_of(at)), id);
    Locked guard;
    timed_events += flag == c10::EventFlag::BACKEND_DEFAULT;
    if (!*event) *event = new Event();
    *(Event*)*event = {id, key_of(at), queued_on(key_of(at)), streams[key_of(at)].holds, end_of(key_of(at)), label_of(key_of(at))};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void block(void* event, const c10::Stream& by) const override {
    if (!event) return;
    auto& [id, stream, reached_after, holds, time, label] = *(Event*)event;
    trace("take", name_of(key_of(by)), id);
    time_block(key_of(by), time, label);
    if (stream.second != 0) advance(stream, reached_after);
    else if (stream != key_of(by))
      for (auto& hold : holds) push(key_of(by), {std::nullopt, hold});
  }
  bool queryEvent(void* event) const override {
    if (timing && event) {
      if (!is_reached(((Event*)event)->time)) return false;
      advance(((Event*)event)->stream, ((Event*)event)->reached_after);
    }
    Locked guard;
    return !event || streams[((Event*)event)->stream].done >= ((Event*)event)->reached_after;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const auto stream = ((Event*)event)->stream;
    trace("take", "", ((Event*)event)->id);
    note_wait(stream.second == 0 ? "an event of a device's own stream" : "an event of a side stream");
    advance(stream, ((Event*)event)->reached_after);
    wait_until(((Event*)event)->time, ((Event*)event)->label);
  }
  bool queryStream(const c10::Stream& of) const override {
    Locked guard;
    return streams[key_of(of)].done >= streams[key_of(of)].queued;
  }
  void synchronizeStream(const c10::Stream& of) const override {
    note_wait("a stream");
    trace("join", "", name_of(key_of(of)));
    advance(key_of(of));
    wait_until(end_of(key_of(of)), label_of(key_of(of)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    note_wait("a device");
    trace("join");
    touch(device);
    std::vector<StreamKey> keys;
    std::vector<std::weak_ptr<Hold>> holds;
    {
      Locked guard;
      for (auto& [key, stream] : streams)
        if (key.first == device) keys.push_back(key);
      holds.swap(all_holds);
    }
    for (auto& hold : holds)
      if (auto running = hold.lock()) running->settle();
    for (auto key : keys) advance(key);
    wait_for_device(device);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace standin
