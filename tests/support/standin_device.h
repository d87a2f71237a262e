// What the stand-in device's parts know of each other.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace standin {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;
constexpr size_t kCapacity = size_t(4) << 30;

// ---- locks ----

// Lets go of Python's lock, if this thread has it: who waits may wait for a thread that copies or drops a tensor, which needs it.
class WithoutPython {
 public:
  WithoutPython() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

extern std::recursive_mutex lock;

// Holds the lock of all that is kept here, and waits for it without Python's.
class Locked {
 public:
  Locked() {
    if (lock.try_lock()) return;
    WithoutPython waiting;
    lock.lock();
  }
  ~Locked() { lock.unlock(); }
  Locked(const Locked&) = delete;
};

// ---- what is counted ----

extern size_t held, peak;
extern int64_t deferred;
extern std::vector<std::string> hazards; // what would go wrong on a GPU, now and then
extern std::set<int> contexts;           // devices on which this process has asked for something
extern int only_device;                  // the one that it is to keep to, if not negative

void note_hazard(const std::string& what);

// Where the host has waited for a device: thread and for what.
extern std::vector<std::pair<int, std::string>> waits;

void note_wait(const std::string& what);


extern thread_local int computing; // such operators that this thread is in
extern int64_t timed_events;       // events that note the time when they are reached, so far

// Bytes of host memory that are locked for copies, now and at most.
extern size_t pinned_bytes, most_pinned_bytes;

void note_pinned(size_t nbytes);
bool is_pinned(const void* address);

// ---- the current device of a thread ----

extern thread_local c10::DeviceIndex current_device;

// Work on a device, which makes a context there.
void touch(c10::DeviceIndex device);

// That of a device, or of the current one where it has no index.
c10::DeviceIndex index_of(c10::Device device);

struct OnDevice {
  explicit OnDevice(c10::DeviceIndex device) : before(current_device) { current_device = device; }
  ~OnDevice() { current_device = before; }
  c10::DeviceIndex before;
};

// ---- memory ----

c10::Allocator* memory();
c10::DeviceIndex device_of(const void* address);
void record_stream(const at::Tensor& tensor);

// Whether freed memory is kept for later requests, as by torch's allocator of CUDA memory. What is kept at the end is unmapped.
void keep_freed(bool keeps);

// Opens blocks to the host for as long as it lives.
class Opened {
 public:
  ~Opened();
  void add(const at::Tensor& tensor);
  void add(const void* address);

 private:
  std::vector<char*> addresses_;
};

// The same memory as a host tensor, to be touched while it is open.
at::Tensor on_host(const at::Tensor& tensor);

// ---- streams ----

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

// What a stream may be held up by.
struct Hold {
  virtual ~Hold() = default;
  // Returns when it has ended, to whoever asks; raises what it failed with.
  virtual void settle() = 0;
};

using Holds = std::vector<std::shared_ptr<Hold>>;

StreamKey current_stream(c10::DeviceIndex device);

// Waits, on the host, for all that a stream has in its queue.
void advance(StreamKey stream);

// Waits, on the host, for what a stream is held up by.
void settle(StreamKey stream);

// Leaves a copy for later; false where it has to be made now.
bool defer(const at::Tensor& source, const at::Tensor& target, StreamKey stream);

// What this thread's current stream of a device is asked from now on comes behind the hold.
void hold_up_current_stream(c10::DeviceIndex device, const std::shared_ptr<Hold>& hold);

// A hold that synchronizing a device waits for, whoever else does.
void note_hold(const std::shared_ptr<Hold>& hold);

void define_communicator(pybind11::module& module);

// ---- a trace ----

extern std::atomic<bool> tracing;

using Access = std::tuple<uint64_t, uint64_t, bool>; // begin, end, whether it writes

void note_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes);

// Notes the tensors that `counts` among an operator's arguments, or its results, which are new and written to if they are no views.
template <class Values, class Counts>
void note_values(std::vector<Access>& accesses, Values values, const std::vector<c10::Argument>& named, bool are_new, Counts counts) {
  for (const auto& each : named) {
    const auto& value = *values++;
    const bool writes = each.alias_info() ? each.alias_info()->isWrite() : are_new;
    auto look = [&](const at::Tensor& tensor) {
      if (tensor.defined() && counts(tensor)) note_access(accesses, tensor, writes);
    };
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) look(tensor);
  }
}

// Adds an entry. Kinds, each by an actor, which is a stream, a communicator or this thread (""):
//   do                   reads and writes memory
//   give, take           what comes behind a `take` of an id comes behind what its giver had done by then
//   join                 likewise, for all that the actor named by the id was asked for; all but threads without an id
//   allocate, free       memory of a device, on the stream that is current, "kept" if it had been freed; `keep`: not to be given out
//                        again under that stream's use
//   drop                 the last reference to memory, behind all that threads did with it
//   pin, unpin           host memory; the id is "torch" for its own allocator's, which keeps it as long as copies of it run
//   worker               this thread is none of the script's
void trace(const char* kind, std::string actor = "", std::string id = "", std::vector<Access> accesses = {}, std::string name = "");

std::string name_of(StreamKey stream);

// Whether an operator reads or writes memory itself, and leaves it to no other operator.
bool is_a_leaf(const c10::OperatorHandle& op);

void define_trace(pybind11::module& module);

// ---- a clock ----

extern std::atomic<bool> timing;

// What this thread does meanwhile is the stand-in's work, and not the host's.
class Excluded {
 public:
  Excluded();
  ~Excluded();
  Excluded(const Excluded&) = delete;
};

// An operator, whose own copies are no waits.
struct Computing {
  Computing();
  ~Computing();
  Excluded excluded;
};

// The time at which a stream has done all that it has been asked for, and the label of its last copy.
double end_of(StreamKey stream);
std::string label_of(StreamKey stream);

void time_launch();
void time_copy(StreamKey stream, bool down, size_t nbytes, bool waits);

// A stream waits for a time, the end of something.
void time_block(StreamKey by, double end, const std::string& what);

// The host waits.
void wait_until(double end, const std::string& what);
void wait_for_device(c10::DeviceIndex device);
bool is_reached(double end);

void define_clock(pybind11::module& module);

} // namespace standin
