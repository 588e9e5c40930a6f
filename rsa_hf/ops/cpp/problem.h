// The problem that scan.cpp solves, and what operator.cpp calls. No header of PyTorch is needed here.

#pragma once

#include <cstdint>

namespace rsa_hf {

using Index = std::int64_t;

// The positions (keys or queries) of one row and head of a tensor, from some channel on; null without a tensor.
template <typename Number>
struct Positions {
  Number* first;
  Index stride;

  explicit operator bool() const { return first; }
  Number* operator()(Index position) const { return first + position * stride; }
};

// A tensor [rows, heads, positions, channels]: strides in numbers, 1 for channels.
struct Tensor {
  void* data;
  Index row, head, position;

  template <typename Number>
  Positions<Number> at(Index b, Index h, Index channel) const {
    auto* numbers = static_cast<Number*>(data);
    return {numbers ? numbers + b * row + h * head + channel : nullptr, position};
  }
};

// An RSA head, and the places of its numbers among the learned ones: `HeadRow` of problem.py.
struct Row {
  Index index, kind, dilation, gate, rate, lags;
};

// Numbers that are learned, in float32 or float64.
struct Learned {
  void* data;
  Index is_wide;

  double operator[](Index place) const {
    return is_wide ? static_cast<const double*>(data)[place] : static_cast<const float*>(data)[place];
  }

  void add(Index place, double number) const {
    if (!data) return;
    if (is_wide) static_cast<double*>(data)[place] += number;
    else static_cast<float*>(data)[place] += float(number);
  }
};

// What `RSAHeads` computes, from what is learned to the mixed output, and back.
struct Problem {
  Index rows, heads, keys, queries, channels, query_offset, num_key_value_groups, is_causal, threads;
  Index window;          // positions that a query sees back, itself included; 0: all
  const bool* key_mask;  // [rows, keys], false where a key is hidden; or null
  Index key_mask_row;
  const Index* documents;  // [rows, keys]; or null
  Index documents_row;
  const Row* layout;                           // [heads], ascending
  double scale;                                // of what is learned; 0: gates and rates are given directly
  Index free_lags_of_head;                     // K
  Learned mu, eta, nu, theta, free_lags;       // without `mu`, only P V is computed
  Learned dmu, deta, dnu, dtheta, dfree_lags;  // gradients, which are added to
  Tensor value, attention, output, grad, dattention, dvalue;

  bool is_query(Index key) const { return key >= query_offset && key < query_offset + queries; }

  // Whether head h reads the same value head as the one before it.
  bool shares_value(Index h) const {
    return h > 0 && layout[h].index / num_key_value_groups == layout[h - 1].index / num_key_value_groups;
  }
};

enum class Pass { FORWARD, FEW_QUERIES, BACKWARD };

// Compute a pass of a problem whose tensors are all of `Number`: float or double.
template <typename Number>
void solve(const Problem& problem, Pass pass);

}  // namespace rsa_hf
