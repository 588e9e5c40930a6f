// P V, mixed into attention, and its gradients, step by step: the recurrence that __init__.py describes.
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace rsa_hf {
namespace {

constexpr Index REGULAR = 0, SIN = 2;
constexpr Index MOST_FREE_LAGS = 8;
constexpr double NEGLIGIBLE = 0x1p-30;  // share of the largest value, in P V: below what float32 resolves

// What a learned number stands for, and the derivative of that by the number.
struct Rate {
  double value, slope;

  static Rate sigmoid(double x, double scale) {
    if (!scale) return {x, 1};
    const double y = 1 / (1 + std::exp(-scale * x));
    return {y, scale * y * (1 - y)};
  }

  static Rate tanh(double x, double scale) {
    if (!scale) return {x, 1};
    const double y = std::tanh(scale * x);
    return {y, scale * (1 - y * y)};
  }

  static Rate linear(double x, double scale) { return scale ? Rate{scale * x, scale} : Rate{x, 1}; }
};

constexpr Index KEYS = 32;  // walked by a head before the next head's turn: their channels share pages of memory

// Neighbouring channels, computed side by side in one register: the states of a backward pass, or with free lags,
// leave no registers for two.
template <typename Number>
struct Lanes {
  typedef Number Register __attribute__((vector_size(32)));
  static constexpr Index COUNT = sizeof(Register) / sizeof(Number);
  Register numbers{};

  // Copies of a size that the compiler knows are one instruction; others are calls, which need memory.
  static Lanes load(const Number* from, Index count) {
    if (count == COUNT) return load(from);
    Number padded[COUNT] = {};
    std::memcpy(padded, from, count * sizeof(Number));
    return load(padded);
  }

  static Lanes load(const Number* from) {
    Lanes loaded;
    std::memcpy(&loaded.numbers, from, sizeof(Register));
    return loaded;
  }

  void store(Number* to, Index count) const {
    if (count == COUNT) std::memcpy(to, &numbers, sizeof(Register));
    else std::memcpy(to, &numbers, count * sizeof(Number));
  }

  friend Lanes operator+(const Lanes& a, const Lanes& b) { return {a.numbers + b.numbers}; }
  friend Lanes operator-(const Lanes& a, const Lanes& b) { return {a.numbers - b.numbers}; }
  friend Lanes operator*(const Lanes& a, const Lanes& b) { return {a.numbers * b.numbers}; }
  friend Lanes operator*(Number a, const Lanes& b) { return {a * b.numbers}; }

  double sum() const {
    double total = 0;
    for (Index k = 0; k < COUNT; k++) total += double(numbers[k]);
    return total;
  }

  // Long decays end in subnormal numbers, with which processors compute far more slowly.
  Lanes without_subnormal() const {
    constexpr Number limit = std::numeric_limits<Number>::min();
    return {((numbers < limit) & (numbers > -limit)) ? Register{} : numbers};
  }
};

// One head of one row.
struct Head {
  const Row& from;
  Index row, index, dilation;
  bool shares_value;
  Index window;  // in its own steps
  Rate gate, decay, theta;
  std::complex<double> direction;  // e^{iθ}
  std::complex<double> z;          // decay · e^{iθ}
  std::complex<double> unit;       // 1, or −i for sin heads: the paper's f is Re(unit · z^k) at step k
  bool is_real;                    // no imaginary part has to be computed
  Index free_lags;                 // K, or as many as its window shows
  double added[MOST_FREE_LAGS];    // free lags minus the paper's f
  const bool* key_mask;
  const Index* documents;

  Head(const Problem& p, Index b, Index h)
      : from(p.layout[h]),
        row(b),
        index(from.index),
        dilation(std::min(from.dilation, p.keys)),
        shares_value(p.shares_value(h)),
        window(p.window ? (p.window - 1) / dilation + 1 : 0),
        gate(p.mu.data ? Rate::sigmoid(p.mu[from.gate], p.scale) : Rate{1, 0}),
        decay(is_regular() ? Rate::tanh(p.eta[from.rate], p.scale)
                           : Rate::sigmoid(p.nu[from.rate], p.scale)),
        theta(is_regular() ? Rate{0, 0} : Rate::linear(p.theta[from.rate], p.scale)),
        key_mask(p.key_mask ? p.key_mask + b * p.key_mask_row : nullptr),
        documents(p.documents ? p.documents + b * p.documents_row : nullptr) {
    // Behind a shut gate too, P V must not overflow: 0 · inf would be NaN.
    if (p.scale && float(gate.value) == 0) decay = {0, 0};
    direction = is_regular() ? 1 : std::polar(1.0, theta.value);
    z = decay.value * direction;
    unit = from.kind == SIN ? std::complex<double>(0, -1) : 1;
    is_real = z.imag() == 0 && from.kind != SIN;
    free_lags = window ? std::min(p.free_lags_of_head, window - 1) : p.free_lags_of_head;
    std::complex<double> power = unit;
    for (Index k = 0; k < free_lags; k++) {
      power *= z;
      added[k] = p.free_lags[from.lags * p.free_lags_of_head + k] - power.real();
    }
  }

  bool is_regular() const { return from.kind == REGULAR; }
  bool is_seen(Index key) const { return !key_mask || key_mask[key]; }
};

// The state s of some channels, and its derivative q with respect to z.
template <typename Number>
struct State {
  Lanes<Number> real, imaginary, dreal, dimaginary;

  // s ← z s + c x and q ← s + z q.
  template <bool is_real, bool has_derivative>
  void step(std::complex<Number> z, std::complex<Number> c, const Lanes<Number>& x) {
    const Number re = z.real(), im = z.imag();
    if constexpr (has_derivative) {
      const Lanes<Number> a = dreal, b = dimaginary;
      dreal = real + re * a;
      if constexpr (!is_real) {
        dreal = dreal - im * b;
        dimaginary = imaginary + im * a + re * b;
      }
    }
    // c x first: this keeps the chain from step to step short.
    const Lanes<Number> a = real, b = imaginary;
    real = c.real() * x + re * a;
    if constexpr (!is_real) {
      real = real - im * b;
      imaginary = c.imag() * x + im * a + re * b;
    }
  }

  friend State operator+(const State& a, const State& b) {
    return {a.real + b.real, a.imaginary + b.imaginary, a.dreal + b.dreal, a.dimaginary + b.dimaginary};
  }

  // s += c z^k x and q += c k z^{k−1} x.
  template <bool is_real, bool has_derivative>
  void add(std::complex<Number> power, std::complex<Number> slope, const Lanes<Number>& x) {
    real = real + power.real() * x;
    if constexpr (!is_real) imaginary = imaginary + power.imag() * x;
    if constexpr (has_derivative) dreal = dreal + slope.real() * x;
    if constexpr (has_derivative && !is_real) dimaginary = dimaginary + slope.imag() * x;
  }

  // s = z^k t and q = z^k ∂t/∂z + k z^{k−1} t, for another state t.
  template <bool is_real, bool has_derivative>
  void assign_product(std::complex<Number> power, std::complex<Number> slope, const State& t) {
    const Number a = power.real(), b = power.imag(), c = slope.real(), d = slope.imag();
    real = a * t.real;
    if constexpr (has_derivative) dreal = a * t.dreal + c * t.real;
    if constexpr (!is_real) {
      real = real - b * t.imaginary;
      imaginary = b * t.real + a * t.imaginary;
      if constexpr (has_derivative) {
        dreal = dreal - (b * t.dimaginary + d * t.imaginary);
        dimaginary = b * t.dreal + a * t.dimaginary + (d * t.real + c * t.imaginary);
      }
    }
  }

  // s += c s and q += c q.
  void correct(std::complex<Number> c) {
    for (auto [re, im] : {std::pair(&real, &imaginary), std::pair(&dreal, &dimaginary)}) {
      const Lanes<Number> a = *re, b = *im;
      *re = (a + (c.real() * a - c.imag() * b)).without_subnormal();
      *im = (b + (c.imag() * a + c.real() * b)).without_subnormal();
    }
  }
};

// Neighbouring channels of a head, on a walk.
template <typename Number>
struct Channels {
  const Problem& p;
  const Head& head;
  bool is_backwards;
  Index first, count;
  Number rest = 1 - Number(head.gate.value);

  template <typename Any>
  Positions<Any> of(const Tensor& layer) const {
    return layer.at<Any>(head.row, head.index, first);
  }

  template <typename Any>
  Positions<Any> of_value_head(const Tensor& values) const {
    return values.at<Any>(head.row, head.index / p.num_key_value_groups, first);
  }

  Lanes<Number> load(const Number* from) const { return Lanes<Number>::load(from, count); }
};

// A sweep says what to do at each key, for some channels of a head: first `visit(key, state)`, then the state takes in
// the channels at `read(key)`, or nothing if that is null. A sweep with derivatives has `visit_lag(key, k, x)` for
// free lag k (counted from 0) and the channels x at that lag, and `finish()` for the end of a run of keys; for other
// sweeps, free lags are part of the state.

template <typename Number>
struct ForwardSweep {
  static constexpr bool HAS_DERIVATIVE = false;
  const Channels<Number> c;
  Positions<const Number> value = c.template of_value_head<const Number>(c.p.value);
  Positions<const Number> attention = c.template of<const Number>(c.p.attention);
  Positions<Number> output = c.template of<Number>(c.p.output);

  const Number* read(Index key) const { return c.head.is_seen(key) ? value(key) : nullptr; }

  void visit(Index key, const State<Number>& state) const {
    if (!c.p.is_query(key)) return;
    const Index query = key - c.p.query_offset;
    Lanes<Number> y = state.real;
    if (c.is_backwards) y = y + c.load(output(query));
    else if (attention) y = y + c.rest * c.load(attention(query));
    y.store(output(query), c.count);
  }
};

// Pᵀ dY is the walk over dY in the other direction.
template <typename Number>
struct ValueSweep {
  static constexpr bool HAS_DERIVATIVE = false;
  const Channels<Number> c;
  bool adds = c.head.shares_value || !c.is_backwards;
  Positions<const Number> grad = c.template of<const Number>(c.p.grad);
  Positions<Number> dvalue = c.template of_value_head<Number>(c.p.dvalue);

  const Number* read(Index key) const { return c.p.is_query(key) ? grad(key - c.p.query_offset) : nullptr; }

  void visit(Index key, const State<Number>& state) const {
    Lanes<Number> dv = adds ? c.load(dvalue(key)) : Lanes<Number>{};
    if (c.head.is_seen(key)) dv = dv + state.real;
    dv.store(dvalue(key), c.count);
  }
};

// Sums over the walks of a head.
struct Sums {
  std::complex<double> states, slopes;  // Σ dy · s and Σ dy · q, for an amplitude of 1
  double attention = 0;                 // Σ dy · attention
  double lags[MOST_FREE_LAGS] = {};     // Σ_t dy_t · v_{t − k − 1}

  void operator+=(const Sums& other) {
    for (Index k = 0; k < MOST_FREE_LAGS; k++) lags[k] += other.lags[k];
    states += other.states;
    slopes += other.slopes;
    attention += other.attention;
  }
};

template <typename Number>
struct ParameterSweep {
  static constexpr bool HAS_DERIVATIVE = true;
  const Channels<Number> c;
  Sums& sums;
  Positions<const Number> value = c.template of_value_head<const Number>(c.p.value);
  Positions<const Number> grad = c.template of<const Number>(c.p.grad);
  Positions<const Number> attention = c.template of<const Number>(c.p.attention);
  Positions<Number> dattention = c.template of<Number>(c.p.dattention);
  State<Number> added{};
  Lanes<Number> attended{};

  const Number* read(Index key) const { return c.head.is_seen(key) ? value(key) : nullptr; }

  void visit(Index key, const State<Number>& state) {
    if (!c.p.is_query(key)) return;
    const Index query = key - c.p.query_offset;
    const auto dy = c.load(grad(query));
    added.real = added.real + dy * state.real;
    added.dreal = added.dreal + dy * state.dreal;
    if (!c.head.is_real) {
      added.imaginary = added.imaginary + dy * state.imaginary;
      added.dimaginary = added.dimaginary + dy * state.dimaginary;
    }
    if (!attention || c.is_backwards) return;
    attended = attended + dy * c.load(attention(query));
    (c.rest * dy).store(dattention(query), c.count);
  }

  void visit_lag(Index key, Index k, const Lanes<Number>& x) {
    if (c.p.is_query(key)) sums.lags[k] += (c.load(grad(key - c.p.query_offset)) * x).sum();
  }

  void finish() {
    sums.states += std::complex<double>(added.real.sum(), added.imaginary.sum());
    sums.slopes += std::complex<double>(added.dreal.sum(), added.dimaginary.sum());
    sums.attention += attended.sum();
  }
};

// A walk of one head along the keys, in runs of KEYS.
template <typename Number>
class Walk {
 public:
  // The states include the amplitude and the gate, unless there are derivatives.
  Walk(const Problem& p, Index b, Index h, bool is_backwards, bool has_derivative)
      : head(p, b, h), p(p), is_backwards(is_backwards), z(head.z) {
    const std::complex<double> c = has_derivative ? 1 : head.gate.value * head.unit * head.z;
    amplitude = std::complex<Number>(c);
    for (Index k = 0; k < head.free_lags; k++) added[k] = Number(head.gate.value * head.added[k]);
    // z is rounded. The relative error of z^k, about k (exact / rounded − 1), is corrected after each run.
    const std::complex<double> rounded(z);
    lost = rounded == 0.0 ? 0.0 : head.z / rounded - 1.0;
    groups = (p.channels + Lanes<Number>::COUNT - 1) / Lanes<Number>::COUNT;
    states.resize(head.dilation * groups);
    std::complex<double> power = 1, slope = 0;
    for (Index k = 0; head.window && k <= head.window; k++) {
      powers.emplace_back(power);
      slopes.emplace_back(slope);
      written.emplace_back(c * power);
      slope = power + head.z * slope;
      power *= head.z;
      if (std::norm(power) < std::numeric_limits<double>::min()) power = 0;
    }
    suffixes.resize(states.size() * head.window);
  }

  template <template <typename> class Sweep, typename... More>
  void run(Index first, More&... more) {
    if (head.free_lags) run_channels<Sweep<Number>, false, true>(first, more...);
    else if (head.is_real) run_channels<Sweep<Number>, true, false>(first, more...);
    else run_channels<Sweep<Number>, false, false>(first, more...);
  }

  const Head head;

 private:
  template <typename Sweep, bool is_real, bool has_free_lags, typename... More>
  void run_channels(Index first, More&... more) {
    const Index end = std::min(first + KEYS, p.keys);
    for (Index start = first; start < std::min(first + head.dilation, end); start++) {
      for (Index group = 0; group < groups; group++) {
        const Index channel = group * Lanes<Number>::COUNT;
        const Index count = std::min(p.channels - channel, Lanes<Number>::COUNT);
        const Index which = start % head.dilation * groups + group;
        State<Number>* suffix = suffixes.data() + which * head.window;
        const Channels<Number> channels{p, head, is_backwards, channel, count};
        run_keys<is_real, has_free_lags>(start, end, states[which], suffix, Sweep{channels, more...});
      }
    }
  }

  // Keys that are `dilation` apart share a state.
  template <bool is_real, bool has_free_lags, typename Sweep>
  void run_keys(Index start, Index end, State<Number>& kept, State<Number>* suffix, Sweep sweep) const {
    State<Number> state = kept;
    Index steps = 0;
    for (Index i = start; i < end; i += head.dilation, steps++) {
      const Index key = key_of(i);
      if (i >= head.dilation && !is_one_document(i, i - head.dilation)) state = {};
      if (head.window) {
        const Index k = i / head.dilation % head.window;
        if (k == 0) {
          state = {};
          read_suffix<is_real>(i, suffix, sweep);
        }
        const Index last = i - (k + 1) * head.dilation;
        visit<has_free_lags>(i, last >= 0 && is_one_document(i, last) ? state + suffix[k] : state, sweep);
      } else visit<has_free_lags>(i, state, sweep);
      const Number* x = sweep.read(key);
      const auto loaded = x ? sweep.c.load(x) : Lanes<Number>{};
      state.template step<is_real, Sweep::HAS_DERIVATIVE>(z, amplitude, loaded);
    }
    if constexpr (Sweep::HAS_DERIVATIVE) sweep.finish();
    state.correct(std::complex<Number>(double(steps) * lost));
    kept = state;
  }

  // Decided at compile time: copying the state, which free lags need, takes longer than the rest of a step.
  template <bool has_free_lags, typename Sweep>
  void visit(Index i, const State<Number>& state, Sweep& sweep) const {
    if constexpr (has_free_lags) sweep.visit(key_of(i), with_free_lags(i, state, sweep));
    else sweep.visit(key_of(i), state);
  }

  template <typename Sweep>
  State<Number> with_free_lags(Index i, State<Number> state, Sweep& sweep) const {
    for (Index k = 0; k < head.free_lags; k++) {
      const Index before = i - (k + 1) * head.dilation;
      if (before < 0 || !is_one_document(i, before)) break;
      const Number* x = sweep.read(key_of(before));
      if (!x) continue;
      if constexpr (Sweep::HAS_DERIVATIVE) sweep.visit_lag(key_of(i), k, sweep.c.load(x));
      else state.real = state.real + added[k] * sweep.c.load(x);
    }
    return state;
  }

  // What the queries of the block that begins at i see of the block before: query k sees those of its w keys after k.
  template <bool is_real, typename Sweep>
  void read_suffix(Index i, State<Number>* suffix, const Sweep& sweep) const {
    const Index w = head.window, last = i - head.dilation;
    if (last < 0) return;
    State<Number> sum{};
    for (Index k = w - 1; k >= 0; k--) {
      suffix[k].template assign_product<is_real, Sweep::HAS_DERIVATIVE>(powers[k], slopes[k], sum);
      const Index before = i - (w - k) * head.dilation;
      const Number* x = sweep.read(key_of(before));
      if (x && is_one_document(before, last))
        sum.template add<is_real, Sweep::HAS_DERIVATIVE>(
            written[w - 1 - k], slopes[w - 1 - k], sweep.c.load(x));
    }
  }

  Index key_of(Index i) const { return is_backwards ? p.keys - 1 - i : i; }

  bool is_one_document(Index i, Index j) const {
    return !head.documents || head.documents[key_of(i)] == head.documents[key_of(j)];
  }

  const Problem& p;
  bool is_backwards;
  std::complex<Number> z, amplitude;
  Number added[MOST_FREE_LAGS];
  std::complex<double> lost;
  Index groups;
  std::vector<State<Number>> states;
  // For windows: z^k, k z^{k−1} and c z^k; and for each state what the queries of a block see of the block before.
  std::vector<std::complex<Number>> powers, slopes, written;
  std::vector<State<Number>> suffixes;
};

// Walk heads [begin, end) of row b along all keys, side by side, or one by one with windows, which need memory.
template <template <typename> class Sweep, typename Number, typename... More>
void walk(const Problem& p, Index b, Index begin, Index end, bool is_backwards, std::vector<More>&... more) {
  const Index beside = p.window ? 1 : end - begin;
  for (Index h = begin; h < end; h += beside) {
    std::vector<Walk<Number>> walks;
    walks.reserve(beside);
    for (Index i = 0; i < beside; i++) walks.emplace_back(p, b, h + i, is_backwards, Sweep<Number>::HAS_DERIVATIVE);
    for (Index first = 0; first < p.keys; first += KEYS)
      for (Index i = 0; i < beside; i++) walks[i].template run<Sweep>(first, more[h - begin + i]...);
  }
}

template <typename Number>
void forward_heads(const Problem& p, Index b, Index begin, Index end) {
  walk<ForwardSweep, Number>(p, b, begin, end, false);
  if (!p.is_causal) walk<ForwardSweep, Number>(p, b, begin, end, true);
}

template <typename Number>
void backward_heads(const Problem& p, Index b, Index begin, Index end, std::vector<Sums>& of_rows) {
  walk<ValueSweep, Number>(p, b, begin, end, true);
  if (!p.is_causal) walk<ValueSweep, Number>(p, b, begin, end, false);
  std::vector<Sums> sums(end - begin);
  walk<ParameterSweep, Number>(p, b, begin, end, false, sums);
  if (!p.is_causal) walk<ParameterSweep, Number>(p, b, begin, end, true, sums);
  std::copy(sums.begin(), sums.end(), of_rows.begin() + b * p.heads + begin);
}

// The gradients of what is learned, from the sums of each row and head.
void add_gradients(const Problem& p, const std::vector<Sums>& of_rows) {
  for (Index h = 0; h < p.heads; h++) {
    const Head head(p, 0, h);
    Sums sums;
    for (Index b = 0; b < p.rows; b++) sums += of_rows[b * p.heads + h];
    const double g = head.gate.value;
    std::complex<double> by_z = head.unit * (head.z * sums.slopes + sums.states), power = head.unit;
    double by_gate = (head.unit * head.z * sums.states).real() - sums.attention;
    for (Index k = 0; k < head.free_lags; k++) {
      by_z -= sums.lags[k] * double(k + 1) * power;
      power *= head.z;
      by_gate += head.added[k] * sums.lags[k];
      p.dfree_lags.add(head.from.lags * p.free_lags_of_head + k, g * sums.lags[k]);
    }
    p.dmu.add(head.from.gate, head.gate.slope * by_gate);
    (head.is_regular() ? p.deta : p.dnu).add(head.from.rate, g * head.decay.slope * (by_z * head.direction).real());
    if (!head.is_regular()) p.dtheta.add(head.from.rate, -g * head.theta.slope * (by_z * head.z).imag());  // ∂z/∂θ = i z
  }
}

// g f(kd) at the steps k = 1, 2, … that matter: those beyond k add at most ρ^{k+1} / (1 − ρ) in all, with ρ = |z|.
template <typename Number>
std::vector<Number> weights_of_steps(const Head& head, Index longest) {
  std::vector<Number> weights;
  weights.reserve(std::min(longest, Index(256)));
  const double rho = std::abs(head.z), x = head.z.real(), y = head.z.imag();
  double size = 1, real = head.unit.real(), imaginary = head.unit.imag();
  for (Index k = 0; k < longest; k++) {
    if (k >= head.free_lags && size <= NEGLIGIBLE * (1 - rho)) break;
    // Written out, because the product of std::complex checks for NaN.
    const double turned = real * x - imaginary * y;
    imaginary = real * y + imaginary * x;
    real = turned;
    size *= rho;
    const double added = k < head.free_lags ? head.added[k] : 0;
    weights.push_back(Number(head.gate.value * (real + added)));
  }
  return weights;
}

// Compute one query from the keys it reads, for GROUPS groups of channels side by side: a key is read as a whole, in
// memory order, and because the compiler knows GROUPS, the sums stay in registers.
template <typename Number, Index GROUPS>
void query_channels(const Problem& p, const Head& head, const std::vector<Number>& weights, Index query, Index first,
                    Index channels) {
  const Index position = p.query_offset + query;
  const Channels<Number> c{p, head, false, first, channels};
  const auto value = c.template of_value_head<const Number>(p.value);
  static constexpr Index WIDTH = Lanes<Number>::COUNT;
  const auto width = [channels](Index i) { return std::min(channels - i * WIDTH, Index(WIDTH)); };
  Lanes<Number> y[GROUPS];
  for (Index side : {-1, 1}) {
    if (side > 0 && p.is_causal) break;
    const Index room = (side < 0 ? position : p.keys - 1 - position) / head.dilation;
    Index farthest = std::min(Index(weights.size()), room);
    if (head.window) farthest = std::min(farthest, head.window - 1);
    for (Index k = farthest; k > 0; k--) {
      const Index key = position + side * k * head.dilation;
      if (!head.is_seen(key) || (head.documents && head.documents[key] != head.documents[position])) continue;
      const Number* x = value(key);
      for (Index i = 0; i < GROUPS; i++) y[i] = y[i] + weights[k - 1] * Lanes<Number>::load(x + i * WIDTH, width(i));
    }
  }
  const auto attention = c.template of<const Number>(p.attention);
  Number* output = c.template of<Number>(p.output)(query);
  for (Index i = 0; i < GROUPS; i++) {
    if (attention) y[i] = c.rest * Lanes<Number>::load(attention(query) + i * WIDTH, width(i)) + y[i];
    y[i].store(output + i * WIDTH, width(i));
  }
}

template <typename Number>
void query_heads(const Problem& p, Index b, Index begin, Index end) {
  constexpr Index WIDTH = Lanes<Number>::COUNT;
  for (Index h = begin; h < end; h++) {
    const Head head(p, b, h);
    const auto weights = weights_of_steps<Number>(head, p.keys / head.dilation);
    for (Index query = 0; query < p.queries; query++) {
      Index first = 0;
      for (; first + 8 * WIDTH <= p.channels; first += 8 * WIDTH)
        query_channels<Number, 8>(p, head, weights, query, first, 8 * WIDTH);
      for (; first < p.channels; first += WIDTH)
        query_channels<Number, 1>(p, head, weights, query, first, p.channels - first);
    }
  }
}

// Run `task(row, begin, end)` for heads [begin, end) of each row, in threads. Heads of one value head stay together.
template <typename Task>
void in_parallel(const Problem& p, Task task) {
  const Index parts = std::min(p.heads, (p.threads + p.rows - 1) / p.rows);
  const auto start = [&p, parts](Index part) {
    Index h = p.heads * part / parts;
    while (h < p.heads && p.shares_value(h)) h++;
    return h;
  };
#pragma omp parallel for collapse(2) num_threads(p.threads)
  for (Index b = 0; b < p.rows; b++)
    for (Index part = 0; part < parts; part++) task(b, start(part), start(part + 1));
}

template <typename Number>
void forward(const Problem& p) {
  in_parallel(p, [&p](auto... part) { forward_heads<Number>(p, part...); });
}

// The same for a few queries, which read the keys within reach and carry no states.
template <typename Number>
void queries(const Problem& p) {
  in_parallel(p, [&p](auto... part) { query_heads<Number>(p, part...); });
}

template <typename Number>
void backward(const Problem& p) {
  std::vector<Sums> sums(p.rows * p.heads);
  in_parallel(p, [&p, &sums](auto... part) { backward_heads<Number>(p, part..., sums); });
  add_gradients(p, sums);
}

}  // namespace

template <typename Number>
void solve(const Problem& p, Pass pass) {
  if (pass == Pass::FORWARD) forward<Number>(p);
  else if (pass == Pass::FEW_QUERIES) queries<Number>(p);
  else backward<Number>(p);
}

template void solve<float>(const Problem&, Pass);
template void solve<double>(const Problem&, Pass);

}  // namespace rsa_hf
