// The gradient of `kda_chunk` for one head of one sequence; included once for each instruction set (for_each_isa.h).
//
// In a tile of 16 tokens, with G the inclusive cumulative sum of log_decay from its first token, S the state before it:
//   A_ij = k_i . (exp(G_i - G_j) k_j), i > j      B_ij = q_i . (exp(G_i - G_j) k_j), i >= j
//   W = V - (exp(G) K) S      (I + diag(beta) A) R = diag(beta) W      O = (exp(G) Q) S + B R
//   S_out = diag(exp(G_end)) S + (exp(G_end - G) K)^T R
// All exponents are <= 0. The states before the tiles are computed forward, a segment of tiles at a time so that they
// stay small, and the gradients backward. Rows past a sequence's end are zero, which changes no state.


// out[rows][columns] (+)= a b with a(i, k) = a[i * a_row + k * a_inner] and b [inner][columns]; columns in whole vectors.
template <int M, int N>
KIMI_K3_INLINE void product_block(float* out, const float* a, int64_t a_row, int64_t a_inner, const float* b, int64_t inner,
                                  int64_t columns, bool add, float sign) {
  Vec sums[M][N] = {};
  for (int64_t k = 0; k < inner; ++k) {
    Vec row[N];
    for (int n = 0; n < N; ++n) row[n] = load_vec(b + k * columns + n * kLanes);
    for (int m = 0; m < M; ++m) {
      const Vec factor = splat(a[m * a_row + k * a_inner]);
      for (int n = 0; n < N; ++n) sums[m][n] += factor * row[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      float* target = out + m * columns + n * kLanes;
      store_vec(target, add ? load_vec(target) + sign * sums[m][n] : sign * sums[m][n]);
    }
}

// `rows` is a multiple of 4: tokens of a tile, or a padded key or value width.
KIMI_K3_TARGET static void product(float* out, const float* a, int64_t a_row, int64_t a_inner, const float* b, int64_t rows,
                                   int64_t inner, int64_t columns, bool add = false, float sign = 1.0f) {
  for (int64_t i = 0; i < rows; i += 4) {
    int64_t j = 0;
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
      product_block<4, 2>(out + i * columns + j, a + i * a_row, a_row, a_inner, b + j, inner, columns, add, sign);
    for (; j < columns; j += kLanes)
      product_block<4, 1>(out + i * columns + j, a + i * a_row, a_row, a_inner, b + j, inner, columns, add, sign);
  }
}

KIMI_K3_TARGET static void transpose(const float* x, int64_t rows, int64_t columns, float* out) {
  for (int64_t i = 0; i < rows; i += 4)  // both widths are multiples of 4
    for (int64_t j = 0; j < columns; j += 4)
      for (int64_t b = 0; b < 4; ++b)
        for (int64_t a = 0; a < 4; ++a) out[(j + b) * rows + i + a] = x[(i + a) * columns + j + b];
}

KIMI_K3_INLINE float dot(const float* a, const float* b, int64_t count) {
  Vec sum = {};
  for (int64_t i = 0; i < count; i += kLanes) sum += load_vec(a + i) * load_vec(b + i);
  return sum_lanes(sum);
}

struct BackwardTile {  // what the forward pass keeps of a tile
  float* state;        // [K, V] before it
  float *update, *unexplained;  // R and W, [16, V]
  float *A, *B;                 // [16, 16]
};

template <class T>
struct HeadGradient {
  const BackwardInputs<T>& in;
  int64_t h, keys, values;  // padded to whole vectors
  std::vector<float> memory;
  float *q, *k, *v, *grad_o, *G, *decay, *decayed_q, *decayed_k, *k_to_end, *end_decay, *beta;
  float *state, *grad_state, *next_grad_state, *turned, *grad_decayed_q, *grad_decayed_k, *grad_k_to_end;
  float *grad_update, *grad_right, *grad_v, *rows_q, *rows_k, *columns, *grad_A, *grad_B, *grad_beta;
  std::vector<float> kept;
  int64_t kept_size;

  KIMI_K3_TARGET HeadGradient(const BackwardInputs<T>& inputs, int64_t head)
      : in(inputs), h(head), keys((inputs.key_dim + kLanes - 1) / kLanes * kLanes),
        values((inputs.value_dim + kLanes - 1) / kLanes * kLanes) {
    const int64_t by_key = kGradTile * keys, by_value = kGradTile * values, square = kGradTile * kGradTile;
    struct Part {
      float** at;
      int64_t size;
    };
    const Part parts[] = {
        {&q, by_key}, {&k, by_key}, {&G, by_key}, {&decay, by_key}, {&decayed_q, by_key}, {&decayed_k, by_key},
        {&k_to_end, by_key}, {&grad_decayed_q, by_key}, {&grad_decayed_k, by_key}, {&grad_k_to_end, by_key},
        {&rows_q, by_key}, {&rows_k, by_key}, {&columns, by_key}, {&v, by_value}, {&grad_o, by_value},
        {&grad_update, by_value}, {&grad_right, by_value}, {&grad_v, by_value}, {&end_decay, keys}, {&beta, kGradTile},
        {&grad_beta, kGradTile}, {&grad_A, square}, {&grad_B, square}, {&state, keys * values},
        {&grad_state, keys * values}, {&next_grad_state, keys * values}, {&turned, keys * values}};
    int64_t total = 0;
    for (const Part& part : parts) total += part.size;
    memory.resize(total);
    float* next = memory.data();
    for (const Part& part : parts) *part.at = next, next += part.size;
    kept_size = keys * values + 2 * by_value + 2 * square;
  }

  BackwardTile tile(int64_t place) {
    float* at = &kept[place * kept_size];
    float* update = at + keys * values;
    float* unexplained = update + kGradTile * values;
    float* A = unexplained + kGradTile * values;
    return {at, update, unexplained, A, A + kGradTile * kGradTile};
  }

  KIMI_K3_TARGET void load_rows(float* out, const T* base, int64_t width, int64_t padded, int64_t first, int64_t count) {
    for (int64_t i = 0; i < kGradTile; ++i)
      for (int64_t d = 0; d < padded; ++d)
        out[i * padded + d] = i < count && d < width ? load(base + ((first + i) * in.heads + h) * width + d) : 0.0f;
  }

  KIMI_K3_TARGET void load_tile(int64_t first, int64_t count) {
    load_rows(q, in.q, in.key_dim, keys, first, count);
    load_rows(k, in.k, in.key_dim, keys, first, count);
    load_rows(v, in.v, in.value_dim, values, first, count);
    for (int64_t i = 0; i < kGradTile; ++i) {
      beta[i] = i < count ? in.beta[(first + i) * in.heads + h] : 0.0f;
      const float* row = in.log_decay + ((first + i) * in.heads + h) * in.key_dim;
      for (int64_t d = 0; d < keys; ++d)
        G[i * keys + d] = (i ? G[(i - 1) * keys + d] : 0.0f) + (i < count && d < in.key_dim ? row[d] : 0.0f);
    }
    const float* end = G + (kGradTile - 1) * keys;
    for (int64_t d = 0; d < keys; d += kLanes) {
      store_vec(end_decay + d, exp_vec(load_vec(end + d)));
      for (int64_t at = d; at < kGradTile * keys; at += keys) {
        const Vec factor = exp_vec(load_vec(G + at)), key = load_vec(k + at);
        store_vec(decay + at, factor);
        store_vec(decayed_q + at, factor * load_vec(q + at));
        store_vec(decayed_k + at, factor * key);
        store_vec(k_to_end + at, exp_vec(load_vec(end + d) - load_vec(G + at)) * key);
      }
    }
  }

  // Fills `t` from the state before the tile and moves `state` past it.
  KIMI_K3_TARGET void forward(const BackwardTile& t) {
    std::copy_n(state, keys * values, t.state);
    for (int64_t i = 0; i < kGradTile; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        Vec a = {}, b = {};
        for (int64_t d = 0; d < keys; d += kLanes) {
          const Vec key = exp_vec(load_vec(G + i * keys + d) - load_vec(G + j * keys + d)) * load_vec(k + j * keys + d);
          a += load_vec(k + i * keys + d) * key;
          b += load_vec(q + i * keys + d) * key;
        }
        t.A[i * kGradTile + j] = i > j ? sum_lanes(a) : 0.0f;
        t.B[i * kGradTile + j] = sum_lanes(b);
      }
    std::copy_n(v, kGradTile * values, t.unexplained);
    product(t.unexplained, decayed_k, keys, 1, state, kGradTile, keys, values, true, -1.0f);
    for (int64_t i = 0; i < kGradTile; ++i)
      for (int64_t c = 0; c < values; c += kLanes) {
        Vec row = load_vec(t.unexplained + i * values + c);
        for (int64_t j = 0; j < i; ++j) row -= t.A[i * kGradTile + j] * load_vec(t.update + j * values + c);
        store_vec(t.update + i * values + c, beta[i] * row);
      }
    for (int64_t d = 0; d < keys; ++d)
      for (int64_t c = 0; c < values; c += kLanes)
        store_vec(state + d * values + c, end_decay[d] * load_vec(state + d * values + c));
    product(state, k_to_end, 1, keys, t.update, keys, kGradTile, values, true);
  }

  // The gradients of the tile's rows, and `grad_state` before it from the one after it.
  KIMI_K3_TARGET void backward(const BackwardTile& t, int64_t first, int64_t count) {
    load_rows(grad_o, in.grad, in.value_dim, values, first, count);
    product(grad_update, t.B, 1, kGradTile, grad_o, kGradTile, kGradTile, values);
    product(grad_update, k_to_end, keys, 1, grad_state, kGradTile, keys, values, true);
    for (int64_t j = kGradTile - 1; j >= 0; --j)
      for (int64_t c = 0; c < values; c += kLanes) {
        Vec row = load_vec(grad_update + j * values + c);
        for (int64_t i = j + 1; i < kGradTile; ++i)
          row -= beta[i] * t.A[i * kGradTile + j] * load_vec(grad_right + i * values + c);
        store_vec(grad_right + j * values + c, row);
        store_vec(grad_v + j * values + c, beta[j] * row);
      }
    for (int64_t i = 0; i < kGradTile; ++i) {
      grad_beta[i] = dot(grad_right + i * values, t.unexplained + i * values, values);
      for (int64_t j = 0; j < kGradTile; ++j) {
        const float* update = t.update + j * values;
        const float system = j < i ? -dot(grad_right + i * values, update, values) : 0.0f;
        grad_beta[i] += system * t.A[i * kGradTile + j];
        grad_A[i * kGradTile + j] = beta[i] * system;
        grad_B[i * kGradTile + j] = j <= i ? dot(grad_o + i * values, update, values) : 0.0f;
      }
    }
    transpose(t.state, keys, values, turned);
    product(grad_decayed_q, grad_o, values, 1, turned, kGradTile, values, keys);
    product(grad_decayed_k, grad_v, values, 1, turned, kGradTile, values, keys, false, -1.0f);
    transpose(grad_state, keys, values, turned);
    product(grad_k_to_end, t.update, values, 1, turned, kGradTile, values, keys);
    through_products();
    for (int64_t d = 0; d < keys; ++d) {  // the end's decay, then the state before the tile
      float* row = grad_state + d * values;
      float through_end = end_decay[d] * dot(t.state + d * values, row, values);
      for (int64_t i = 0; i < kGradTile; ++i) through_end += k_to_end[i * keys + d] * grad_k_to_end[i * keys + d];
      next_grad_state[d] = through_end;  // kept here until the rows below need it
    }
    write_rows(first, count);
    for (int64_t d = 0; d < keys; ++d)
      for (int64_t c = 0; c < values; c += kLanes)
        store_vec(grad_state + d * values + c, end_decay[d] * load_vec(grad_state + d * values + c));
    product(grad_state, decayed_q, 1, keys, grad_o, keys, kGradTile, values, true);
    product(grad_state, decayed_k, 1, keys, grad_v, keys, kGradTile, values, true, -1.0f);
  }

  // From the gradients of A and B to those of q (rows_q) and k (rows_k as a row, columns as a column).
  KIMI_K3_TARGET void through_products() {
    for (int64_t d = 0; d < keys; d += kLanes) {
      for (int64_t at = d; at < kGradTile * keys; at += keys) store_vec(columns + at, Vec{});
      for (int64_t i = 0; i < kGradTile; ++i) {
        const int64_t row = i * keys + d;
        const Vec key_i = load_vec(k + row), query_i = load_vec(q + row), end = load_vec(G + row);
        Vec for_q = {}, for_k = {};
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t column = j * keys + d;
          const Vec factor = exp_vec(end - load_vec(G + column)), key = factor * load_vec(k + column);
          const float a = grad_A[i * kGradTile + j], b = grad_B[i * kGradTile + j];
          for_k += a * key;
          for_q += b * key;
          store_vec(columns + column, load_vec(columns + column) + factor * (a * key_i + b * query_i));
        }
        store_vec(rows_q + row, for_q);
        store_vec(rows_k + row, for_k);
      }
    }
  }

  KIMI_K3_TARGET void write_rows(int64_t first, int64_t count) {
    const float *end = G + (kGradTile - 1) * keys, *through_end = next_grad_state;
    for (int64_t d = 0; d < keys; d += kLanes) {
      const int64_t used = std::min<int64_t>(kLanes, in.key_dim - d);
      Vec later = load_vec(through_end + d);  // the sum over this row and all later ones
      for (int64_t i = kGradTile - 1; i >= 0; --i) {
        const int64_t at = i * keys + d;
        const Vec of_q = load_vec(grad_decayed_q + at), of_k = load_vec(grad_decayed_k + at);
        const Vec of_end = load_vec(grad_k_to_end + at), row_q = load_vec(rows_q + at), row_k = load_vec(rows_k + at);
        const Vec column = load_vec(columns + at), key = load_vec(k + at), factor = load_vec(decay + at);
        later += load_vec(decayed_q + at) * of_q + load_vec(decayed_k + at) * of_k - load_vec(k_to_end + at) * of_end;
        later += load_vec(q + at) * row_q + key * (row_k - column);
        if (i >= count) continue;
        const int64_t target = ((first + i) * in.heads + h) * in.key_dim + d;
        const Vec to_end = exp_vec(load_vec(end + d) - load_vec(G + at));
        store_some(in.grad_q + target, factor * of_q + row_q, used);
        store_some(in.grad_k + target, factor * of_k + to_end * of_end + row_k + column, used);
        store_some(in.grad_log_decay + target, later, used);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      in.grad_beta[(first + i) * in.heads + h] = grad_beta[i];
      T* target = in.grad_v + ((first + i) * in.heads + h) * in.value_dim;
      for (int64_t c = 0; c < values; c += kLanes)
        store_some(target + c, load_vec(grad_v + i * values + c), std::min<int64_t>(kLanes, in.value_dim - c));
    }
  }

  KIMI_K3_TARGET void run(int64_t n, int64_t begin, int64_t end) {
    const int64_t tiles = (end - begin + kGradTile - 1) / kGradTile;
    const int64_t segments = (tiles + kSegmentTiles - 1) / kSegmentTiles;
    kept.resize(std::min(tiles, kSegmentTiles) * kept_size);
    std::fill_n(state, keys * values, 0.0f);
    for (int64_t d = 0; d < in.key_dim; ++d)
      std::copy_n(in.states + ((n * in.heads + h) * in.key_dim + d) * in.value_dim, in.value_dim, state + d * values);
    std::fill_n(grad_state, keys * values, 0.0f);
    std::vector<float> starts(segments * keys * values);  // the state before each segment
    const auto run_forward = [&](int64_t segment) KIMI_K3_TARGET {
      const int64_t last = std::min(tiles, (segment + 1) * kSegmentTiles);
      for (int64_t i = segment * kSegmentTiles; i < last; ++i) {
        const int64_t first = begin + i * kGradTile;
        load_tile(first, std::min(kGradTile, end - first));
        forward(tile(i - segment * kSegmentTiles));
      }
    };
    for (int64_t segment = 0; segment < segments; ++segment) {
      std::copy_n(state, keys * values, &starts[segment * keys * values]);
      if (segment + 1 < segments) run_forward(segment);
    }
    for (int64_t segment = segments - 1; segment >= 0; --segment) {
      std::copy_n(&starts[segment * keys * values], keys * values, state);
      run_forward(segment);
      const int64_t last = std::min(tiles, (segment + 1) * kSegmentTiles);
      for (int64_t i = last - 1; i >= segment * kSegmentTiles; --i) {
        const int64_t first = begin + i * kGradTile, count = std::min(kGradTile, end - first);
        load_tile(first, count);
        backward(tile(i - segment * kSegmentTiles), first, count);
      }
    }
  }
};

template <class T>
KIMI_K3_TARGET void gradient_heads(const BackwardInputs<T>& in, const std::vector<int64_t>& bounds, int64_t begin,
                                   int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = i / in.heads;
    HeadGradient<T>(in, i % in.heads).run(n, bounds[n], bounds[n + 1]);
  }
}
