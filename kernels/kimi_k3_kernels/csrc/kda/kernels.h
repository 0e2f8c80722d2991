// KDA for one head: the step, and the chunk form in tiles of 16 tokens (equations: kda/reference.py).

// A row in float32, zeros behind it. A null row is zeros.
template <class T>
KIMI_K3_INLINE void load_row(const T* from, int64_t width, int64_t padded, float* to) {
  for (int64_t i = 0; i < padded; i += kLanes) store_vec(to + i, from == nullptr ? Vec{} : load_some(from + i, width - i));
}

// --- one token ---

struct StepRow {  // [K] each, decays included where named so; padded to whole vectors
  float *decay, *k, *decayed_k, *decayed_q;
  float beta, k_dot_q;
};

// N vectors of the state's columns: one pass that reads them for both products, one from cache that writes them.
template <int N, class T>
KIMI_K3_INLINE void step_columns(const StepRow& row, int64_t key_dim, int64_t column, const T* v, const StatePlaces& state,
                                 const float* next, T* out) {
  Vec seen[N], read[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) seen[n] = read[n] = Vec{};
  if (state.from != nullptr)
    for (int64_t d = 0; d < key_dim; ++d) {
      const float* from = state.from + d * state.from_stride + column;
      const Vec k = splat(row.decayed_k[d]), q = splat(row.decayed_q[d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        Vec s = load_vec(from + n * kLanes);
        seen[n] += k * s;
        read[n] += q * s;
      }
    }
  Vec update[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) {
    update[n] = row.beta * (load_vec(v + column + n * kLanes) - seen[n]);
    store_vec(out + column + n * kLanes, read[n] + row.k_dot_q * update[n]);
  }
  if (state.to == nullptr) return;
  for (int64_t d = 0; d < key_dim; ++d) {
    float* to = state.to + d * state.to_stride + column;
    const Vec k = splat(row.k[d]);
    // While this state is written from cache, the memory bus is free for the next one.
    if (next != nullptr)
      for (int n = 0; n < N; n += 64 / (4 * kLanes)) __builtin_prefetch(next + d * state.from_stride + column + n * kLanes, 0, 2);
    if (state.from != nullptr) {
      const float* from = state.from + d * state.from_stride + column;
      const Vec decay = splat(row.decay[d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) store_vec(to + n * kLanes, decay * load_vec(from + n * kLanes) + k * update[n]);
    } else {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) store_vec(to + n * kLanes, k * update[n]);
    }
  }
}

template <class T>
KIMI_K3_TARGET static void step_single_column(const StepRow& row, int64_t key_dim, int64_t column, const T* v,
                                              const StatePlaces& state, T* out) {
  float seen = 0, read = 0;
  for (int64_t d = 0; d < key_dim && state.from != nullptr; ++d) {
    const float s = state.from[d * state.from_stride + column];
    seen += row.decayed_k[d] * s;
    read += row.decayed_q[d] * s;
  }
  const float update = row.beta * (load(v + column) - seen);
  store(out + column, read + row.k_dot_q * update);
  for (int64_t d = 0; d < key_dim && state.to != nullptr; ++d) {
    const float s = state.from == nullptr ? 0.0f : row.decay[d] * state.from[d * state.from_stride + column];
    state.to[d * state.to_stride + column] = s + row.k[d] * update;
  }
}

// `next`: the state that this thread reads after this one, or null. `scratch`: 4 rows of padded K. Not inlined, so that a
// token has the same instructions wherever it comes from, whatever the compiler would make of each place.
template <class T>
KIMI_K3_TARGET static __attribute__((noinline)) void step(const KdaInputs<T>& in, int64_t t, int64_t h, const StatePlaces& state, const float* next,
                                float* scratch, T* out) {
  const int64_t padded = round_up(in.key_dim, kTile);
  StepRow row{scratch, scratch + padded, scratch + 2 * padded, scratch + 3 * padded, in.beta(t, h), 0};
  load_row(in.log_decay.row(t, h), in.key_dim, padded, row.decay);
  load_row(in.k.row(t, h), in.key_dim, padded, row.k);
  load_row(in.q.row(t, h), in.key_dim, padded, row.decayed_q);
  Vec k_dot_q{};
  for (int64_t d = 0; d < padded; d += kLanes) {
    Vec decay = exp_vec(load_vec(row.decay + d)), k = load_vec(row.k + d), q = load_vec(row.decayed_q + d);
    k_dot_q += k * q;
    store_vec(row.decay + d, decay);
    store_vec(row.decayed_k + d, decay * k);
    store_vec(row.decayed_q + d, decay * q);
  }
  row.k_dot_q = sum_lanes(k_dot_q);

  constexpr int kWide = kLanes == 16 ? 8 : 4;  // two sums for each vector stay in registers
  const T* v = in.v.row(t, h);
  int64_t column = 0;
  for (; column + kWide * kLanes <= in.value_dim; column += kWide * kLanes)
    step_columns<kWide>(row, in.key_dim, column, v, state, next, out);
  for (; column + kLanes <= in.value_dim; column += kLanes) step_columns<1>(row, in.key_dim, column, v, state, next, out);
  for (; column < in.value_dim; ++column) step_single_column(row, in.key_dim, column, v, state, out);
}

// --- 16 tokens ---

constexpr int kPanel = 2 * kLanes;                       // columns of the state in one panel, which lies whole in L1
constexpr int kPanelRows = kLanes == 16 ? 8 : 4;         // rows of a register block of [rows, kPanel]
constexpr int kTileVecs = kTile / kLanes;                // vectors in a row of [.., 16]
constexpr int kTileRows = kLanes == 16 ? 16 : kLanes == 8 ? 4 : 2;

// What one tile needs beside the state; K padded to whole vectors with zeros.
struct Tile {
  explicit Tile(int64_t key_dim)
      : padded(round_up(key_dim, kTile)), scratch((9 * kTile + 1) * padded + 2 * kTile * kTile + 4 * kTile * kPanel) {
    float* next = scratch.floats;
    auto take = [&](int64_t count) { return next += count, next - count; };
    k = take(kTile * padded);
    q = take(kTile * padded);
    log_decay = take(kTile * padded);
    left = take(2 * kTile * padded);
    right = take(kTile * padded);
    decayed = take(2 * kTile * padded);
    k_to_end = take(kTile * padded);
    end_decay = take(padded);
    products = take(2 * kTile * kTile);
    v = take(kTile * kPanel);
    from_state = take(2 * kTile * kPanel);
    updates = take(kTile * kPanel);
  }
  int64_t padded;
  Scratch scratch;
  float *k, *q, *log_decay;   // [16, K]
  float *left, *right;        // k then q with their share of the decay [32, K]; k with the rest of it: [K, 16] or [16, K]
  float* decayed;             // exp(G) k, exp(G) q [32, K]
  float *k_to_end, *end_decay;  // exp(G_16 - G) k [16, K]; exp(G_16) [K]
  float* products;            // A, then B [32, 16]; read below the diagonal, and B on it
  float *v, *from_state, *updates;  // of one panel: [16, P], decayed S [32, P], R [16, P]
  float beta[kTile];
};

// Swap rows and columns of kLanes vectors.
KIMI_K3_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      if (r & step) continue;
      Vec a = rows[r], b = rows[r + step], low, high;
#if defined(__clang__)
      for (int i = 0; i < kLanes; ++i) {
        low[i] = i & step ? b[i ^ step] : a[i];
        high[i] = i & step ? b[i] : a[i ^ step];
      }
#else
      Bits take_low, take_high;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        take_low[i] = i & step ? kLanes + (i ^ step) : i;
        take_high[i] = i & step ? kLanes + i : i ^ step;
      }
      low = __builtin_shuffle(a, b, take_low);
      high = __builtin_shuffle(a, b, take_high);
#endif
      rows[r] = low;
      rows[r + step] = high;
    }
  }
}

// All decays of the tile are above exp(-80), so half of that from the middle is safe in either direction:
// exp(G_i - G_j) = exp(G_i - M) exp(M - G_j) with M = G_16 / 2.
KIMI_K3_TARGET static void prepare_bounded(Tile& tile) {
  const int64_t width = tile.padded;
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec total{}, cumulative{};
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTile; ++i) total += load_vec(tile.log_decay + i * width + d);
    const Vec middle = total * 0.5f, to_middle = exp_vec(middle);
    store_vec(tile.end_decay + d, to_middle * to_middle);
    Vec right[kTileVecs][kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTile; ++i) {
      cumulative += load_vec(tile.log_decay + i * width + d);
      const Vec down = exp_vec(cumulative - middle), up = exp_vec(middle - cumulative);
      const Vec k = load_vec(tile.k + i * width + d), q = load_vec(tile.q + i * width + d);
      store_vec(tile.left + i * width + d, k * down);
      store_vec(tile.left + (kTile + i) * width + d, q * down);
      store_vec(tile.decayed + i * width + d, k * down * to_middle);
      store_vec(tile.decayed + (kTile + i) * width + d, q * down * to_middle);
      store_vec(tile.k_to_end + i * width + d, k * up * to_middle);
      right[i / kLanes][i % kLanes] = k * up;
    }
#pragma GCC unroll 4
    for (int part = 0; part < kTileVecs; ++part) {
      transpose(right[part]);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_vec(tile.right + (d + i) * kTile + part * kLanes, right[part][i]);
    }
  }
  for (int64_t row = 0; row < 2 * kTile; row += kTileRows) {
    Vec sums[kTileRows][kTileVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 4
      for (int part = 0; part < kTileVecs; ++part) sums[r][part] = Vec{};
    for (int64_t d = 0; d < width; ++d) {
      Vec right[kTileVecs];
#pragma GCC unroll 4
      for (int part = 0; part < kTileVecs; ++part) right[part] = load_vec(tile.right + d * kTile + part * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const Vec left = splat(tile.left[(row + r) * width + d]);
#pragma GCC unroll 4
        for (int part = 0; part < kTileVecs; ++part) sums[r][part] += left * right[part];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r)
#pragma GCC unroll 4
      for (int part = 0; part < kTileVecs; ++part) store_vec(tile.products + (row + r) * kTile + part * kLanes, sums[r][part]);
  }
}

KIMI_K3_INLINE float dot(const float* a, const float* b, int64_t width) {
  Vec sum{};
  for (int64_t d = 0; d < width; d += kLanes) sum += load_vec(a + d) * load_vec(b + d);
  return sum_lanes(sum);
}

// Rows [middle, end) of A and B against columns [begin, middle), then each half by itself. Both exponents are sums of
// log-decays away from the edge before `middle`, so they are <= 0, and no decay elsewhere takes digits from them.
KIMI_K3_TARGET static void products_by_halves(Tile& tile, int64_t begin, int64_t end) {
  const int64_t width = tile.padded;
  if (end - begin == 1) {
    tile.products[(kTile + begin) * kTile + begin] = dot(tile.q + begin * width, tile.k + begin * width, width);
    return;
  }
  const int64_t middle = (begin + end) / 2;
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec from_edge{}, to_edge{};
    for (int64_t i = middle; i < end; ++i) {
      from_edge += load_vec(tile.log_decay + i * width + d);
      const Vec down = exp_vec(from_edge);
      store_vec(tile.left + i * width + d, load_vec(tile.k + i * width + d) * down);
      store_vec(tile.left + (kTile + i) * width + d, load_vec(tile.q + i * width + d) * down);
    }
    for (int64_t j = middle - 1; j >= begin; --j) {
      store_vec(tile.right + j * width + d, load_vec(tile.k + j * width + d) * exp_vec(to_edge));
      to_edge += load_vec(tile.log_decay + j * width + d);
    }
  }
  for (int64_t i = middle; i < end; ++i)
    for (int64_t j = begin; j < middle; ++j)
      for (int64_t row : {i, kTile + i})
        tile.products[row * kTile + j] = dot(tile.left + row * width, tile.right + j * width, width);
  products_by_halves(tile, begin, middle);
  products_by_halves(tile, middle, end);
}

KIMI_K3_TARGET static void prepare_unbounded(Tile& tile) {
  const int64_t width = tile.padded;
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec from_start{}, to_end{};
    for (int64_t i = 0; i < kTile; ++i) {
      from_start += load_vec(tile.log_decay + i * width + d);
      const Vec down = exp_vec(from_start);
      store_vec(tile.decayed + i * width + d, load_vec(tile.k + i * width + d) * down);
      store_vec(tile.decayed + (kTile + i) * width + d, load_vec(tile.q + i * width + d) * down);
    }
    store_vec(tile.end_decay + d, exp_vec(from_start));
    for (int64_t i = kTile - 1; i >= 0; --i) {
      store_vec(tile.k_to_end + i * width + d, load_vec(tile.k + i * width + d) * exp_vec(to_end));
      to_end += load_vec(tile.log_decay + i * width + d);
    }
  }
  products_by_halves(tile, 0, kTile);
}

// Everything of tokens [t, t + count) that does not depend on the state. Missing tokens are zeros: they leave it as it is.
template <class T>
KIMI_K3_TARGET static void prepare(const KdaInputs<T>& in, int64_t t, int64_t h, int64_t count, Tile& tile) {
  const int64_t width = tile.padded;
  float bound = 0;
  for (int64_t i = 0; i < kTile; ++i) {
    const bool present = i < count;
    tile.beta[i] = present ? in.beta(t + i, h) : 0.0f;
    load_row(present ? in.k.row(t + i, h) : nullptr, in.key_dim, width, tile.k + i * width);
    load_row(present ? in.q.row(t + i, h) : nullptr, in.key_dim, width, tile.q + i * width);
    load_row(present ? in.log_decay.row(t + i, h) : nullptr, in.key_dim, width, tile.log_decay + i * width);
  }
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec total{};
    for (int64_t i = 0; i < kTile; ++i) total += load_vec(tile.log_decay + i * width + d);
    float lanes[kLanes];
    store_vec(lanes, total);
    for (float lane : lanes) bound = lane < bound ? lane : bound;
  }
  bound >= -80.0f ? prepare_bounded(tile) : prepare_unbounded(tile);
}

// One panel [K, P] of the state through the tile: what the tokens read of it, their updates R by forward substitution,
// their outputs into rows `out` (of which `count` exist, with `columns` columns), and the state after them.
template <class T>
KIMI_K3_TARGET static void run_panel(const Tile& tile, int64_t count, int64_t columns, float* state, T* out, int64_t out_stride) {
  const int64_t width = tile.padded;
  for (int64_t row = 0; row < 2 * kTile; row += kPanelRows) {
    Vec sums[kPanelRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) sums[r][0] = sums[r][1] = Vec{};
    const float* decayed = tile.decayed + row * width;
    for (int64_t d = 0; d < width; ++d) {
      const Vec s0 = load_vec(state + d * kPanel), s1 = load_vec(state + d * kPanel + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kPanelRows; ++r) {
        const Vec x = splat(decayed[r * width + d]);
        sums[r][0] += x * s0;
        sums[r][1] += x * s1;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) {
      store_vec(tile.from_state + (row + r) * kPanel, sums[r][0]);
      store_vec(tile.from_state + (row + r) * kPanel + kLanes, sums[r][1]);
    }
  }

  const float *A = tile.products, *B = tile.products + kTile * kTile;
  for (int64_t c = 0; c < kPanel; c += kLanes) {
    Vec updates[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i)
      updates[i] = load_vec(tile.v + i * kPanel + c) - load_vec(tile.from_state + i * kPanel + c);
#pragma GCC unroll 16
    for (int j = 0; j < kTile; ++j) {
      updates[j] *= tile.beta[j];
      store_vec(tile.updates + j * kPanel + c, updates[j]);
#pragma GCC unroll 16
      for (int i = j + 1; i < kTile; ++i) updates[i] -= A[i * kTile + j] * updates[j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) {
      Vec o = load_vec(tile.from_state + (kTile + i) * kPanel + c);
#pragma GCC unroll 16
      for (int j = 0; j <= i; ++j) o += B[i * kTile + j] * updates[j];
      if (i < count && c < columns) store_some(out + i * out_stride + c, o, columns - c);
    }
  }

  for (int64_t row = 0; row < width; row += kPanelRows) {
    Vec sums[kPanelRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) {
      const Vec decay = splat(tile.end_decay[row + r]);
      sums[r][0] = decay * load_vec(state + (row + r) * kPanel);
      sums[r][1] = decay * load_vec(state + (row + r) * kPanel + kLanes);
    }
    for (int j = 0; j < kTile; ++j) {
      const Vec u0 = load_vec(tile.updates + j * kPanel), u1 = load_vec(tile.updates + j * kPanel + kLanes);
      const float* k = tile.k_to_end + j * width + row;
#pragma GCC unroll 8
      for (int r = 0; r < kPanelRows; ++r) {
        const Vec x = splat(k[r]);
        sums[r][0] += x * u0;
        sums[r][1] += x * u1;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kPanelRows; ++r) {
      store_vec(state + (row + r) * kPanel, sums[r][0]);
      store_vec(state + (row + r) * kPanel + kLanes, sums[r][1]);
    }
  }
}

// The state of a head between tiles: panels [V / P][K, P], so that a panel's lines do not compete for the same cache sets.
struct PanelState {
  PanelState(int64_t key_dim, int64_t value_dim)
      : key_dim(key_dim), value_dim(value_dim), padded(round_up(key_dim, kTile)), num_panels((value_dim + kPanel - 1) / kPanel),
        scratch(padded * num_panels * kPanel) {}
  float* panel(int64_t p) { return scratch.floats + p * padded * kPanel; }

  // Rows of padding too: a NaN of the sequence before this one would stay in them, and 0 * NaN reach every token.
  KIMI_K3_TARGET void read(const float* from, int64_t stride) {
    for (int64_t p = 0; p < num_panels; ++p)
      for (int64_t d = 0; d < padded; ++d)
        for (int64_t c = 0; c < kPanel; c += kLanes) {
          const int64_t left = value_dim - p * kPanel - c;
          store_vec(panel(p) + d * kPanel + c,
                    from == nullptr || d >= key_dim || left <= 0 ? Vec{} : load_some(from + d * stride + p * kPanel + c, left));
        }
  }
  KIMI_K3_TARGET void write(float* to, int64_t stride) {
    for (int64_t p = 0; p < num_panels; ++p)
      for (int64_t d = 0; d < key_dim; ++d)
        for (int64_t c = 0; c < kPanel; c += kLanes) {
          const int64_t left = value_dim - p * kPanel - c;
          if (left > 0) store_some(to + d * stride + p * kPanel + c, load_vec(panel(p) + d * kPanel + c), left);
        }
  }
  int64_t key_dim, value_dim, padded, num_panels;
  Scratch scratch;
};

// A thread's working memory for `run_tokens`.
struct Scan {
  Scan(int64_t key_dim, int64_t value_dim) : tile(key_dim), state(key_dim, value_dim) {}
  Tile tile;
  PanelState state;
};

template <class T>
KIMI_K3_INLINE void prefetch_row(const T* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// Tokens [begin, end) of one head, from scan.state to scan.state.
template <class T>
KIMI_K3_TARGET static void run_tokens(const KdaInputs<T>& in, int64_t begin, int64_t end, int64_t h, Scan& scan, T* out) {
  Tile& tile = scan.tile;
  const int64_t out_stride = in.heads * in.value_dim;
  for (int64_t t = begin; t < end; t += kTile) {
    const int64_t count = end - t < kTile ? end - t : kTile;
    prepare(in, t, h, count, tile);
    // Heads lie apart in memory, too far for the hardware to foresee: fetch the next tile while this one is computed.
    for (int64_t next = t + count; next < end && next < t + count + kTile; ++next) {
      prefetch_row(in.k.row(next, h), in.key_dim);
      prefetch_row(in.q.row(next, h), in.key_dim);
      prefetch_row(in.log_decay.row(next, h), in.key_dim);
      prefetch_row(in.v.row(next, h), in.value_dim);
    }
    for (int64_t p = 0; p < scan.state.num_panels; ++p) {
      const int64_t columns = in.value_dim - p * kPanel;
      for (int64_t i = 0; i < kTile; ++i)
        for (int64_t c = 0; c < kPanel; c += kLanes)
          store_vec(tile.v + i * kPanel + c,
                    i < count && c < columns ? load_some(in.v.row(t + i, h) + p * kPanel + c, columns - c) : Vec{});
      run_panel(tile, count, columns, scan.state.panel(p), out + t * out_stride + h * in.value_dim + p * kPanel, out_stride);
    }
  }
}

inline void copy_state(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t width) {
  for (int64_t d = 0; d < rows; ++d)
    if (from == nullptr)
      std::fill_n(to + d * to_stride, width, 0.0f);
    else
      std::copy_n(from + d * from_stride, width, to + d * to_stride);
}

// A thread's working memory for `run_steps`.
struct StepScratch {
  StepScratch(int64_t key_dim, int64_t value_dim) : rows(4 * round_up(key_dim, kTile)), state(key_dim * value_dim) {}
  Scratch rows, state;
};

// One head of one sequence, token by token.
template <class T>
static void run_steps(const KdaInputs<T>& in, const ChunkPlan& plan, int64_t n, int64_t h, const float* next,
                      StepScratch& scratch, T* out) {
  const StatePlaces places = plan.places(n, h);
  const int64_t begin = plan.bounds[n], end = plan.bounds[n + 1], width = in.value_dim;
  if (end - begin == 1 && plan.exports[n].empty())
    return step(in, begin, h, places, next, scratch.rows.floats, out + (begin * in.heads + h) * width);
  StatePlaces state{places.from, places.from_stride, scratch.state.floats, width};
  auto exported = plan.exports[n].begin();
  for (int64_t t = begin; t < end; ++t) {
    step(in, t, h, state, nullptr, scratch.rows.floats, out + (t * in.heads + h) * width);
    state.from = state.to;
    state.from_stride = width;
    for (; exported != plan.exports[n].end() && exported->first == t + 1; ++exported)
      if (exported->second >= 0)
        copy_state(state.from, width, plan.pool.head(exported->second, h), plan.pool.row_stride, in.key_dim, width);
  }
  if (places.to != nullptr && places.to != state.from)
    copy_state(state.from, state.from_stride, places.to, places.to_stride, in.key_dim, width);
}

template <class T>
static void recurrent_heads(const KdaInputs<T>& in, const ChunkPlan& plan, int64_t begin, int64_t end, T* out) {
  StepScratch scratch(in.key_dim, in.value_dim);
  for (int64_t task = begin; task < end; ++task)
    run_steps(in, plan, task % plan.num_sequences, task / plan.num_sequences, nullptr, scratch, out);
}

template <class T>
static void chunk_heads(const KdaInputs<T>& in, const ChunkPlan& plan, int64_t begin, int64_t end, T* out) {
  Scan scan(in.key_dim, in.value_dim);
  StepScratch step_scratch(in.key_dim, in.value_dim);
  for (int64_t task = begin; task < end; ++task) {
    // Heads outside: every thread gets a share of every sequence, however their lengths differ.
    const int64_t h = task / plan.num_sequences, n = task % plan.num_sequences;
    if (plan.bounds[n + 1] - plan.bounds[n] == 1) {  // a decode token among prefill pieces: a tile would compute 16
      const float* next = n + 1 < plan.num_sequences ? plan.places(n + 1, h).from : nullptr;
      run_steps(in, plan, n, h, next, step_scratch, out);
      continue;
    }
    StatePlaces places = plan.places(n, h);
    scan.state.read(places.from, places.from_stride);
    int64_t t = plan.bounds[n];
    for (auto [at, slot] : plan.exports[n]) {
      run_tokens(in, t, at, h, scan, out);
      t = at;
      if (slot >= 0) scan.state.write(plan.pool.head(slot, h), plan.pool.row_stride);
    }
    run_tokens(in, t, plan.bounds[n + 1], h, scan, out);
    if (places.to != nullptr) scan.state.write(places.to, places.to_stride);
  }
}

template <class T>
static void step_heads(const KdaInputs<T>& in, const StepPlan& plan, int64_t begin, int64_t end, T* out) {
  Scratch scratch(4 * round_up(in.key_dim, kTile));
  for (int64_t task = begin; task < end; ++task) {
    const int64_t t = task / in.heads, h = task % in.heads;
    const float* next = task + 1 < end ? plan.places((task + 1) / in.heads, (task + 1) % in.heads).from : nullptr;
    step(in, t, h, plan.places(t, h), next, scratch.floats, out + task * in.value_dim);
  }
}
