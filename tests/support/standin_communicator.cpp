// Collectives of the stand-in device, by the rules of NCCL, over gloo in host memory.
//
// - Tensors of one stand-in device, contiguous, of dtypes that NCCL has. All else is refused.
// - A communicator has one queue: a collective starts when those before it have ended. `wait` holds the current stream up, and
//   the host goes on (but for a barrier).
// - Inputs are taken when it is launched, and outputs are NaN until a stream that waits goes on. Who writes into an input or an
//   output before, or gives its memory back, is a hazard, noted.
// - Ranks that meet in collectives of other kinds, sizes, dtypes or roots hang until the time limit, which names both. What else
//   could tell two collectives apart is not looked at: NCCL has no tags.
// - Two communicators whose collectives were launched in one order on a rank and in the other on another are noted.
#include "standin_device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <sstream>
#include <thread>

namespace standin {

namespace {

using Tensors = std::vector<at::Tensor>;
using Run = std::function<at::Tensor(c10d::Backend&, const at::Tensor&)>;

// What ranks compare, as bytes.
struct Call {
  char kind[16];
  int64_t numel, dtype, detail; // detail: the root, or the operator
  int64_t launched;             // how many collectives this process had launched before, on all communicators

  bool meets(const Call& other) const {
    return !strcmp(kind, other.kind) && numel == other.numel && dtype == other.dtype && detail == other.detail;
  }
  std::string words() const {
    return c10::str(kind, " of ", numel, " ", c10::ScalarType(dtype), detail >= 0 ? c10::str(" (", detail, ")") : "");
  }
};

std::atomic<int64_t> launches{0};

// ---- orders of several communicators ----

struct Launch {
  const void* communicator;
  std::vector<int64_t> ranks, launched; // by place
  std::string words;
};

constexpr size_t kRemembered = 256;
std::deque<Launch> history;
std::vector<std::string> crossings;

void look_for_crossings(const Launch& launch) {
  Locked guard;
  for (auto& other : history) {
    if (other.communicator == launch.communicator) continue;
    bool is_before = false, is_behind = false;
    for (size_t place = 0; place < launch.ranks.size(); ++place) {
      auto there = std::find(other.ranks.begin(), other.ranks.end(), launch.ranks[place]);
      if (there == other.ranks.end()) continue;
      (launch.launched[place] < other.launched[there - other.ranks.begin()] ? is_before : is_behind) = true;
    }
    if (is_before && is_behind) crossings.push_back(launch.words + " and " + other.words);
  }
  history.push_back(launch);
  if (history.size() > kRemembered) history.pop_front();
}

// ---- one collective ----

char* begin_of(const at::Tensor& tensor) { return (char*)tensor.storage().data() + tensor.storage_offset() * tensor.element_size(); }

bool is_there(const at::Tensor& tensor) {
  return (tensor.storage_offset() + tensor.numel()) * tensor.element_size() <= tensor.storage().nbytes();
}

// Calls with the parts of a tensor's bytes, (offset, length), that are in none of the others.
void for_parts_outside(const at::Tensor& tensor, const Tensors& others, const std::function<void(size_t, size_t)>& call) {
  std::vector<std::pair<size_t, size_t>> taken;
  const char* begin = begin_of(tensor);
  const size_t nbytes = tensor.nbytes();
  for (auto& other : others) {
    const char *from = std::max<const char*>(begin, begin_of(other)), *to = std::min<const char*>(begin + nbytes, begin_of(other) + other.nbytes());
    if (from < to) taken.emplace_back(from - begin, to - begin);
  }
  std::sort(taken.begin(), taken.end());
  size_t at = 0;
  for (auto [from, to] : taken) {
    if (from > at) call(at, from - at);
    at = std::max(at, to);
  }
  if (at < nbytes) call(at, nbytes - at);
}

class Collective final : public Hold {
 public:
  Collective(Call call, std::string where, Tensors inputs, Tensors outputs, Run run)
      : call(call), where(std::move(where)), inputs_(std::move(inputs)), outputs_(std::move(outputs)), run_(std::move(run)) {
    Tensors taken;
    Opened opened;
    for (auto& input : inputs_) {
      opened.add(input);
      taken.push_back(on_host(input).reshape(-1));
    }
    in_ = taken.empty() ? at::empty({0}) : at::cat(taken);
    // An input that is a part of an output keeps its values; one that is all of it does not.
    for (auto& output : outputs_) {
      opened.add(output);
      Tensors kept;
      for (auto& input : inputs_)
        if (input.nbytes() < output.nbytes()) kept.push_back(input);
      char* begin = begin_of(output);
      for_parts_outside(output, kept, [&](size_t offset, size_t length) { memset(begin + offset, 0xff, length); });
    }
  }

  void execute(c10d::Backend& gloo) { out_ = run_(gloo, in_); }

  void end(std::exception_ptr failure) {
    std::lock_guard guard(mutex_);
    failure_ = failure;
    has_ended_ = true;
    ended_.notify_all();
  }

  bool has_ended() {
    WithoutPython waiting;
    std::lock_guard guard(mutex_);
    return has_ended_;
  }

  void settle() override {
    WithoutPython waiting;
    // Dropped without a lock, which whoever has Python's may want.
    Tensors done;
    std::unique_lock guard(mutex_);
    ended_.wait(guard, [&] { return has_ended_; });
    if (failure_) std::rethrow_exception(failure_);
    if (is_published_) return;
    is_published_ = true;
    publish();
    done = std::move(inputs_);
    done.insert(done.end(), outputs_.begin(), outputs_.end());
    outputs_.clear();
  }

  const Call call;
  const std::string where;

 private:
  void publish() {
    Locked guard;
    Opened opened;
    int64_t offset = 0, start = 0;
    for (auto& input : inputs_) {
      const char* snapshot = (const char*)in_.data_ptr() + start * in_.element_size();
      start += input.numel();
      if (!is_there(input)) note_hazard("the memory of an input was given back: " + words());
      if (!is_there(input) || !input.nbytes()) continue;
      opened.add(input);
      for_parts_outside(input, outputs_, [&](size_t from, size_t length) {
        if (memcmp(begin_of(input) + from, snapshot + from, length)) note_hazard("an input was written before the end: " + words());
      });
    }
    for (auto& output : outputs_) {
      if (!is_there(output)) note_hazard("the memory of an output was given back: " + words());
      if (!is_there(output) || !output.nbytes()) continue;
      opened.add(output);
      on_host(output).reshape(-1).view(at::kByte).copy_(out_.reshape(-1).view(at::kByte).narrow(0, offset, output.nbytes()));
      offset += output.nbytes();
    }
    in_ = out_ = at::Tensor();
  }

  std::string words() const { return call.words() + " of " + where; }

  Tensors inputs_, outputs_;
  Run run_;
  at::Tensor in_, out_; // in host memory
  bool has_ended_ = false, is_published_ = false;
  std::exception_ptr failure_;
  std::mutex mutex_;
  std::condition_variable ended_;
};

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(std::shared_ptr<Collective> collective, c10::DeviceIndex device, bool stops_the_host, std::string id, Tensors kept)
      : collective_(std::move(collective)), device_(device), stops_the_host_(stops_the_host), id_(std::move(id)), kept_(std::move(kept)) {}
  bool isCompleted() override { return collective_->has_ended(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    trace("take", name_of(current_stream(device_)), id_);
    if (stops_the_host_) trace("join", "", name_of(current_stream(device_)));
    kept_.clear();
    if (stops_the_host_) collective_->settle();
    else hold_up_current_stream(device_, collective_);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  std::shared_ptr<Collective> collective_;
  c10::DeviceIndex device_;
  bool stops_the_host_;
  std::string id_;
  Tensors kept_; // till somebody waits, as by torch's NCCL
};

// ---- a communicator ----

// What its thread has, which may outlive it.
struct Queue {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::vector<int64_t> ranks;
  int place;
  std::chrono::milliseconds timeout;
  std::string name;
  std::deque<std::shared_ptr<Collective>> waiting;
  std::exception_ptr failure;
  bool is_closed = false;
  std::mutex mutex;
  std::condition_variable changed;

  void meet(const Collective& collective) {
    const auto since = std::chrono::steady_clock::now();
    auto mine = at::empty({sizeof(Call)}, at::kByte);
    memcpy(mine.data_ptr(), &collective.call, sizeof(Call));
    std::vector<Tensors> theirs{{}};
    for (size_t place = 0; place < ranks.size(); ++place) theirs[0].push_back(at::empty_like(mine));
    Tensors sent{mine};
    try {
      gloo->allgather(theirs, sent)->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, name, ": rank ", ranks[place], " was alone in ", collective.call.words(), " until the time limit of ",
                  timeout.count() / 1000.0, " s, or a peer has ended: ", std::string(error.what()).substr(0, 200));
    }
    Launch launch{this, ranks, {}, collective.call.words() + " of " + name};
    for (size_t other = 0; other < ranks.size(); ++other) {
      auto& call = *(const Call*)theirs[0][other].data_ptr();
      if (!call.meets(collective.call)) {
        std::this_thread::sleep_until(since + timeout);
        TORCH_CHECK(false, name, ": rank ", ranks[place], " was in ", collective.call.words(), " and rank ", ranks[other], " in ",
                    call.words(), " until the time limit of ", timeout.count() / 1000.0, " s");
      }
      launch.launched.push_back(call.launched);
    }
    look_for_crossings(launch);
  }

  void run() {
    while (true) {
      std::shared_ptr<Collective> next;
      {
        std::unique_lock guard(mutex);
        changed.wait(guard, [&] { return is_closed || !waiting.empty(); });
        if (waiting.empty()) return;
        next = waiting.front();
        waiting.pop_front();
      }
      if (!failure) {
        try {
          meet(*next);
          next->execute(*gloo);
        } catch (...) {
          failure = std::current_exception();
        }
      }
      next->end(failure);
    }
  }
};

bool has_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return true;
    default:
      return false;
  }
}

class Communicator final : public c10d::Backend {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int64_t> ranks, std::string name, int64_t timeout_ms)
      : Backend(gloo->getRank(), gloo->getSize()), queue_(std::make_shared<Queue>()) {
    queue_->place = gloo->getRank();
    queue_->gloo = std::move(gloo);
    queue_->ranks = std::move(ranks);
    queue_->name = std::move(name);
    queue_->timeout = std::chrono::milliseconds(timeout_ms);
    // Not joined: a peer that never comes would hold the end of the process up.
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
  ~Communicator() override {
    std::lock_guard guard(queue_->mutex);
    queue_->is_closed = true;
    queue_->changed.notify_all();
  }

  const std::string getBackendName() const override { return "standin"; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto root = options.rootRank;
    Tensors outputs = root == getRank() ? Tensors{} : tensors;
    return launch("broadcast", root, tensors, outputs, [root](c10d::Backend& gloo, const at::Tensor& in) {
      Tensors bytes{in.view(at::kByte)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      if (in.numel()) gloo.broadcast(bytes, options)->wait();
      return in;
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch("all-reduce", int64_t(options.reduceOp.op_), tensors, tensors, [op = options.reduceOp](c10d::Backend& gloo, const at::Tensor& in) {
      return reduced(gloo, in, op);
    });
  }

  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Tensors outputs = options.rootRank == getRank() ? tensors : Tensors{};
    return launch("reduce", options.rootRank, tensors, outputs, [op = options.reduceOp](c10d::Backend& gloo, const at::Tensor& in) {
      return reduced(gloo, in, op);
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return launch("all-gather", -1, inputs, outputs.at(0), gathered(getSize()));
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(), "all-gather: sizes or dtypes");
    return launch("all-gather", -1, {input}, {output}, gathered(getSize()));
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.numel() == output.numel() * getSize() && output.scalar_type() == input.scalar_type(), "reduce-scatter: sizes or dtypes");
    return launch("reduce-scatter", int64_t(options.reduceOp.op_), {input}, {output},
                  [op = options.reduceOp, size = getSize(), place = getRank()](c10d::Backend& gloo, const at::Tensor& in) {
                    return reduced(gloo, in, op).chunk(size)[place].clone();
                  });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    TORCH_CHECK(output_sizes.empty() && input_sizes.empty(), "all-to-all: the stand-in has equal parts only");
    TORCH_CHECK(input.numel() == output.numel() && output.scalar_type() == input.scalar_type(), "all-to-all: sizes or dtypes");
    TORCH_CHECK(input.size(0) % getSize() == 0, "all-to-all: ", input.size(0), " elements are not equal parts for ", getSize(), " ranks");
    return launch("all-to-all", -1, {input}, {output}, [size = getSize(), place = getRank()](c10d::Backend& gloo, const at::Tensor& in) {
      Tensors mine;
      for (auto& theirs : gathered(size)(gloo, in).chunk(size)) mine.push_back(theirs.chunk(size)[place]);
      return at::cat(mine);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return launch("barrier", -1, {}, {}, [](c10d::Backend&, const at::Tensor& in) { return in; }, /*stops_the_host=*/true);
  }

 private:
  static at::Tensor reduced(c10d::Backend& gloo, const at::Tensor& in, const c10d::ReduceOp& op) {
    const bool averages = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors result{in.clone()};
    if (in.numel()) gloo.allreduce(result, options)->wait();
    return averages ? result[0].div_(gloo.getSize()) : result[0];
  }

  static Run gathered(int size) {
    return [size](c10d::Backend& gloo, const at::Tensor& in) {
      Tensors mine{in.view(at::kByte)};
      std::vector<Tensors> parts{{}};
      for (int place = 0; place < size; ++place) parts[0].push_back(at::empty_like(mine[0]));
      if (in.numel()) gloo.allgather(parts, mine)->wait();
      return at::cat(parts[0]).view(in.scalar_type());
    };
  }

  c10::intrusive_ptr<c10d::Work> launch(const char* kind, int64_t detail, const Tensors& inputs, const Tensors& outputs, Run run,
                                        bool stops_the_host = false) {
    auto all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    for (auto& tensor : all) {
      TORCH_CHECK(tensor.device().type() == kType, kind, ": tensors must be on the device, and one is on ", tensor.device());
      if (device_ < 0) device_ = tensor.device().index();
      TORCH_CHECK(tensor.device().index() == device_, kind, ": this communicator is of device ", int(device_), ", not ", tensor.device());
      TORCH_CHECK(has_dtype(tensor.scalar_type()), kind, ": there is no dtype ", tensor.scalar_type());
      TORCH_CHECK(tensor.is_contiguous(), kind, ": tensors must be contiguous");
    }
    const auto device = device_ < 0 ? current_device : device_;
    touch(device);
    settle(current_stream(device));
    Call call{};
    strncpy(call.kind, kind, sizeof(call.kind) - 1);
    for (auto& input : inputs) call.numel += input.numel();
    call.dtype = int64_t(inputs.empty() ? at::kByte : inputs[0].scalar_type());
    call.detail = detail;
    call.launched = launches++;
    auto collective = std::make_shared<Collective>(call, queue_->name, inputs, outputs, std::move(run));
    note_hold(collective);
    {
      std::lock_guard guard(queue_->mutex);
      queue_->waiting.push_back(collective);
      queue_->changed.notify_all();
    }
    const auto id = c10::str("collective ", call.launched);
    if (tracing) {
      std::vector<Access> accesses;
      for (auto& input : inputs) note_access(accesses, input, false);
      for (auto& output : outputs) note_access(accesses, output, true);
      trace("give", name_of(current_stream(device)), "start of " + id);
      trace("take", queue_->name, "start of " + id);
      trace("do", queue_->name, "", std::move(accesses), kind);
      trace("give", queue_->name, id);
      collective->settle();
    }
    return c10::make_intrusive<CollectiveWork>(collective, device, stops_the_host, id, tracing ? all : Tensors{});
  }

  std::shared_ptr<Queue> queue_;
  c10::DeviceIndex device_ = -1;
};

} // namespace

void define_communicator(pybind11::module& module) {
  module.def("crossings", [] {
    Locked guard;
    return crossings;
  });
  module.def("communicator", [](c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int64_t> ranks, std::string name, int64_t timeout_ms) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Communicator>(std::move(gloo), std::move(ranks), std::move(name), timeout_ms);
  });
}

} // namespace standin
