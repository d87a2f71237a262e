// A clock for the stand-in device: the times at which a device with the given links and kernels would have done its work.
//
// The engine runs as usual, and nothing sleeps. Each thread of the host has a clock, which is the thread's CPU time by a factor,
// without the CPU time that the stand-in itself needs for its operators and copies. An operator that passes over large tensors of the host
// counts the bytes that it reads and writes by the rate of the host's memory, or a matrix product its operations by the rate of
// products if that is longer. Each stream has the time at which its last
// entry ends. A copy between the host and the device occupies the link in its direction for its bytes by the link's rate. A kernel
// lasts as long as `delay` was told, and its launch costs the host a fixed time. A host thread that waits for the device sets its clock to the end of the awaited work. As
// streams run their entries in order, and wait for entries that are queued before, each end is known when the entry is queued.
// So other processes on the machine change little: the CPU time of Python.
#include "standin_device.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

namespace standin {

std::atomic<bool> timing{false};

namespace {

// Kind ("down", "up", "kernel", "device waits" or "host waits"), label, thread, begin and end in seconds.
using Span = std::tuple<std::string, std::string, int, double, double>;

struct ThreadClock {
  clockid_t id;
  double excluded = 0, ahead = 0, busy_ahead = 0;
};

std::map<int, ThreadClock*> clocks;
std::map<StreamKey, double> ends;
std::map<StreamKey, std::string> last_labels;
std::vector<Span> spans;
double rates[2] = {1, 1}, link_ends[2] = {0, 0}, host_rate = 1, launch_s = 0, cpu_factor = 1;
double product_rate = std::numeric_limits<double>::infinity(); // operations per second
thread_local std::string label;
thread_local double own_rate = 0; // of this thread's passes; 0 for `host_rate`
thread_local int excluding = 0;
thread_local double excluded_since = 0;

double cpu_time(clockid_t id) {
  timespec found;
  clock_gettime(id, &found);
  return double(found.tv_sec) + 1e-9 * double(found.tv_nsec);
}

ThreadClock& own_clock() {
  thread_local ThreadClock* own = nullptr;
  if (!own) {
    // Never freed: another thread may ask for the clock of a thread that has ended.
    own = new ThreadClock();
    pthread_getcpuclockid(pthread_self(), &own->id);
    Locked guard;
    clocks[gettid()] = own;
  }
  return *own;
}

// Seconds that this thread has computed.
double busy_of(const ThreadClock& clock) { return cpu_factor * (cpu_time(clock.id) - clock.excluded) + clock.busy_ahead; }

double now_of(const ThreadClock& clock) { return busy_of(clock) + clock.ahead; }

double now() {
  auto& clock = own_clock();
  // While an operator of the stand-in runs, the host's clock stands still.
  return now_of(clock) - (excluding ? cpu_factor * (cpu_time(clock.id) - excluded_since) : 0);
}

void catch_up(double until) {
  const double late = until - now();
  if (late > 0) own_clock().ahead += late;
}

void note(const char* kind, const std::string& what, double begin, double end) {
  Locked guard;
  spans.emplace_back(kind, what, gettid(), begin, end);
}

// An operator over large tensors of the host.
struct Pass final : at::ObserverContext {
  Pass(size_t nbytes, double flops) : nbytes(nbytes), flops(flops) {}
  size_t nbytes;
  double flops;
  double since = cpu_time(own_clock().id);
};

thread_local bool in_a_pass = false;
std::optional<at::CallbackHandle> pass_observer;

constexpr size_t kLargeBytes = 64 << 10;

// The bytes of the host that an operator reads, and those that it writes; memory that is written is read first. 0 for an operator
// on a device, whose link moves the bytes.
size_t bytes_of(const at::RecordFunction& function, const c10::OperatorHandle& op) {
  size_t total = 0;
  bool is_elsewhere = false;
  auto value = function.inputs().begin();
  for (const auto& each : op.schema().arguments()) {
    // torch's fused steps write to gradients only if they are told a scale.
    const bool writes = each.alias_info() && each.alias_info()->isWrite() && each.name() != "grads";
    auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      is_elsewhere |= !tensor.is_cpu();
      total += tensor.nbytes() * (writes ? 2 : 1);
    };
    if (value->isTensor()) add(value->toTensor());
    if (value->isTensorList())
      for (const at::Tensor& tensor : value->toTensorList()) add(tensor);
    ++value;
  }
  return is_elsewhere ? 0 : total;
}

// The floating-point operations of a matrix product; 0 for other operators.
double flops_of(const at::RecordFunction& function, const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name != "aten::mm" && name != "aten::addmm" && name != "aten::bmm" && name != "aten::baddbmm") return 0;
  // The factors are the last two tensors without a name of an output.
  std::vector<at::Tensor> tensors;
  auto value = function.inputs().begin();
  for (const auto& each : op.schema().arguments()) {
    if (value->isTensor() && !each.is_out()) tensors.push_back(value->toTensor());
    ++value;
  }
  return 2.0 * double(tensors[tensors.size() - 2].numel()) * double(tensors.back().size(-1));
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  if (!timing || excluding || in_a_pass || !name) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op || !is_a_leaf(*op)) return nullptr;
  const auto nbytes = bytes_of(function, *op);
  if (nbytes < kLargeBytes) return nullptr;
  in_a_pass = true;
  return std::make_unique<Pass>(nbytes, flops_of(function, *op));
}

void end_operator(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  in_a_pass = false;
  auto& clock = own_clock();
  auto& pass = *static_cast<Pass*>(context);
  const double rate = own_rate ? own_rate : host_rate;
  const double seconds = std::max(double(pass.nbytes) / rate, pass.flops / (product_rate * rate / host_rate));
  clock.busy_ahead += seconds - cpu_factor * (cpu_time(clock.id) - pass.since);
}

// The time at which an entry that is queued now begins.
double begin_on(StreamKey stream) { return std::max(now(), ends[stream]); }

} // namespace

Excluded::Excluded() {
  if (timing && excluding++ == 0) excluded_since = cpu_time(own_clock().id);
}

Excluded::~Excluded() {
  if (!excluding || --excluding) return;
  auto& clock = own_clock();
  clock.excluded += cpu_time(clock.id) - excluded_since;
}

double end_of(StreamKey stream) {
  Locked guard;
  return timing ? begin_on(stream) : 0;
}

std::string label_of(StreamKey stream) {
  Locked guard;
  return timing ? last_labels[stream] : "";
}

void time_copy(StreamKey stream, bool down, size_t nbytes, bool waits) {
  if (!timing) return;
  Locked guard;
  auto& link_end = link_ends[down];
  const double begin = std::max(begin_on(stream), link_end), end = begin + double(nbytes) / rates[down];
  link_end = ends[stream] = end;
  last_labels[stream] = label;
  note(down ? "down" : "up", label, begin, end);
  if (waits) wait_until(end, label);
}

void time_block(StreamKey by, double end, const std::string& what) {
  if (!timing) return;
  Locked guard;
  const double begin = begin_on(by);
  if (end <= begin) return;
  if (by.second == 0) note("device waits", what, begin, end);
  ends[by] = end;
}

void wait_until(double end, const std::string& what) {
  if (!timing) return;
  const double begin = now();
  if (end <= begin) return;
  note("host waits", what, begin, end);
  catch_up(end);
}

void wait_for_device(c10::DeviceIndex device) {
  Locked guard;
  for (auto& [stream, end] : ends)
    if (stream.first == device) wait_until(end, "the device");
}

void time_launch() {
  if (timing) own_clock().ahead += launch_s;
}

bool is_reached(double end) { return !timing || now() >= end; }

void define_clock(pybind11::module& module) {
  // Starts the clocks of all threads at 0. Rates are bytes per second: of the links and of the host's memory. `launch` is the
  // seconds that the host needs to start a kernel, `cpu` the seconds for one second of CPU time, `products` the operations per
  // second of the host's matrix products.
  module.def("start_clock", [](double down, double up, double host, double launch, double cpu, double products) {
    Locked guard;
    launch_s = launch;
    cpu_factor = cpu;
    rates[true] = down;
    rates[false] = up;
    link_ends[true] = link_ends[false] = 0;
    host_rate = host;
    product_rate = products;
    ends.clear();
    spans.clear();
    for (auto& [thread, clock] : clocks) clock->ahead = -busy_of(*clock);
    pass_observer = at::addGlobalCallback(at::RecordFunctionCallback(&begin_operator, &end_operator).needsInputs(true).scopes(
        {at::RecordScope::FUNCTION}));
    timing = true;
    own_clock().ahead = -busy_of(own_clock());
  });
  // Stops them. Returns the spans: kind, label, thread, begin, end.
  module.def("end_clock", [] {
    Locked guard;
    timing = false;
    at::removeCallback(*pass_observer);
    pass_observer.reset();
    return std::exchange(spans, {});
  });
  // The number of spans that have been noted.
  module.def("noted", [] {
    Locked guard;
    return spans.size();
  });
  module.def("now", &now);
  // Seconds that this thread has computed, without its waits.
  module.def("busy", [] { return busy_of(own_clock()); });
  module.def("thread", [] { return int(gettid()); });
  module.def("clock_of", [](int thread) {
    Locked guard;
    return now_of(*clocks.at(thread));
  });
  // This thread goes on at a time, if its clock is not there yet.
  module.def("catch_up", &catch_up);
  // Bytes per second of this thread's passes from now on, which depend on its cores; 0 for those of `start_clock`.
  module.def("set_rate", [](double rate) { own_rate = rate; });
  // Copies that this thread queues have this label from now on. Returns the former one.
  module.def("set_label", [](std::string next) { return std::exchange(label, std::move(next)); });
  // A kernel of so many seconds on the current stream of a device.
  module.def("delay", [](int device, double seconds, const std::string& name) {
    Locked guard;
    const auto stream = current_stream(c10::DeviceIndex(device));
    const double begin = begin_on(stream);
    ends[stream] = begin + seconds;
    note("kernel", name, begin, begin + seconds);
  });
}

} // namespace standin
