// Recurrent layers: a causal convolution over the last rows, then a state that each row reads and updates. See
// quant/ops/recurrent.py for the mathematics and quant/ops/states.py for the storage of states and rows between passes.
// Rows are computed one after another with sums in a fixed order, so a row's bits depend only on earlier rows. Sixteen
// columns of a head's state are a task: they stay in L1 for all rows of a pass.
#pragma once
#include "attention.h"

inline namespace LRT_SPACE {

constexpr int MAX_KEY = 256, MAX_TAPS = 8;  // also in quant/ops/recurrent.py
constexpr float KEY_EPS = 1e-6f;            // added to the length of keys and queries

// Offsets of a row's parts in its projection and in its channels.
struct RecurrentShape {
    int inner, keys, channels, factors, row, width, rank;    // row: elements cached per row
    int channels_at, gates_at, strengths_at, decays_at;      // columns in `width`; low-rank gates and decays come last
    int q, k, v;                                             // first channels
    int back;                                                // earlier rows that the convolution needs

    explicit RecurrentShape(const RecurrentArgs& args) : inner(args.heads * args.value_size), keys(args.key_heads * args.key_size) {
        rank = args.gate_up.count ? args.gate_up.cols : 0;
        width = args.mix.rows;
        factors = args.heads * (args.channel_decay ? args.key_size : 1) + args.heads;
        back = (args.taps - 1) * args.dilation;
        if (args.kind == NGRAM) {
            width = inner = channels = args.width;
            factors = 1;
            channels_at = gates_at = strengths_at = decays_at = q = k = v = 0;
        } else if (args.kind == CONV) {
            inner = channels = args.width;
            factors = q = k = v = 0;
            channels_at = 2 * inner;
            gates_at = inner;
            strengths_at = decays_at = 0;
        } else {
            channels = 2 * keys + inner;
            const bool delta = args.kind == DELTA;
            channels_at = delta ? 0 : inner;
            gates_at = delta ? channels : 0;
            strengths_at = inner + channels;
            decays_at = strengths_at + (delta ? args.heads : 0);
            q = delta ? 0 : inner + keys;
            k = delta ? keys : inner;
            v = delta ? 2 * keys : 0;
            if (rank) {
                strengths_at = channels + rank;
                gates_at = width;
                decays_at = width + inner;
                width += inner + args.decay_up.rows;
            }
        }
        row = channels + factors;
    }
};

// One sequence of a pass: the waiting rows, which are not yet in the state, then the new rows.
struct Rows {
    const StateSpan* owner;
    float* past;     // (waiting, row), copies of the waiting rows
    float* fresh;    // (rows, width), as projected
    float* factors;  // (waiting + rows, factors)
    float* dots;     // (waiting + rows, key heads), products of queries with keys
    float* joined;   // (rows, inner), results of the new rows
    int waiting, count, linear, fold;  // the first `linear` rows are consecutive, the others are a tree

    int parent(int i) const {
        if (i < linear) return i - 1;
        const int before = owner->parents[i - linear];
        return before < 0 ? linear - 1 : linear + before;
    }
    bool wanted(int i) const { return i < linear || owner->parents[i - linear] >= -1; }
    // Negative rows are earlier ones, for convolutions; zeros before the sequence.
    const float* before(int i, int row) const {
        const int token = owner->position + i;
        return token < 0 ? nullptr : owner->rows_from + (size_t)(token % owner->ring_from) * row;
    }
    // Reads channels [begin, end) of a waiting row from the cache, or its factors.
    void take_channels(int i, const RecurrentShape& shape, int begin, int end) const {
        copy_floats(before(i, shape.row) + begin, end - begin, past + (size_t)i * shape.row + begin);
    }
    void take_factors(int i, const RecurrentShape& shape) const {
        copy_floats(before(i, shape.row) + shape.channels, shape.factors, factors + (size_t)i * shape.factors);
    }
    void take_kept(int i, const RecurrentShape& shape) const {
        take_channels(i, shape, 0, shape.row);
        take_factors(i, shape);
    }
    float* channels(int i, const RecurrentShape& shape) const {
        return i < waiting ? past + (size_t)i * shape.row : fresh + (size_t)(i - waiting) * shape.width + shape.channels_at;
    }
};

// Calls fn(at, n) for each sixteen of `count` elements; the last call may be for fewer.
template <class Fn> inline void by_sixteen(int count, Fn fn) {
    for (int at = 0; at < count; at += 16) fn(at, least(16, count - at));
}

// A decay from its logarithm. exp16 stops at e^-87; products with that are subnormal and slow, so that such decays
// become 0.
inline F16L decayed(F16L log) {
    const F16L left = exp16(log), least = F16L::set1(1e-20f);
    return left.above(least, left, F16L::zero());
}

// A new row's decays, then the strength of each head's update.
inline void make_factors(const RecurrentArgs& args, const RecurrentShape& shape, const float* line, float* factors) {
    const int heads = args.heads, each = args.channel_decay ? args.key_size : 1;
    float* strengths = factors + heads * each;
    const auto step = [&](int from, int at, int n) { return softplus16(load_some(line + from + at, n) + load_some(args.decay_bias + at, n)); };
    by_sixteen(heads, [&](int h, int n) {
        const F16L decay = load_some(args.decay + h, n);
        if (args.kind == DELTA) {
            store_some(F16L::set1(args.strength) * sigmoid16(load_some(line + shape.strengths_at + h, n)), n, strengths + h);
            if (!args.channel_decay) store_some(decayed(decay * step(shape.decays_at, h, n)), n, factors + h);
        } else {
            const F16L strength = step(shape.strengths_at, h, n).max(F16L::set1(args.least_step)).min(F16L::set1(args.most_step));
            store_some(strength, n, strengths + h);
            store_some(decayed(decay * strength), n, factors + h);
        }
    });
    for (int h = 0; args.channel_decay && h < heads; h++)
        by_sixteen(each, [&](int i, int n) {
            const int at = h * each + i;
            const F16L rate = F16L::set1(args.decay[h]);
            F16L log = F16L::set1(args.decay_floor);
            if (args.decay_floor < 0)
                log = log * sigmoid16(negated(rate) * (load_some(line + shape.decays_at + at, n) + load_some(args.decay_bias + at, n)));
            else
                log = rate * step(shape.decays_at, at, n);
            store_some(decayed(log), n, factors + at);
        });
}

// Caches new rows until they are in the state, and earlier rows that are still waiting or needed by convolutions: numbers
// [begin, end) of a row's channels and the factors behind them.
inline void keep_rows(const RecurrentShape& shape, const Rows& rows, int begin, int end) {
    const StateSpan& span = *rows.owner;
    const int first = most(0, span.fold - shape.back), held = span.held;
    auto place = [&](int token) { return span.rows_to + (size_t)(token % span.ring_to) * shape.row; };
    if (span.rows_to != span.rows_from)
        for (int token = first; token < held; token++)
            copy_floats(rows.before(token - span.position, shape.row) + begin, end - begin, place(token) + begin);
    const int split = least(end, shape.channels);
    for (int token = most(first, held); token < held + span.rows; token++) {
        const int i = token - span.position;
        if (begin < split) copy_floats(rows.channels(i, shape) + begin, split - begin, place(token) + begin);
        if (end > split) copy_floats(rows.factors + (size_t)i * shape.factors, shape.factors, place(token) + shape.channels);
    }
}

// Convolves all rows in place, in channels [begin, end): later rows first, since they need earlier rows' inputs.
inline void convolve(const RecurrentArgs& args, const RecurrentShape& shape, const Rows& rows, int begin, int end) {
    for (int i = rows.count - 1; i >= 0; i--) {
        if (!rows.wanted(i)) continue;
        const float* inputs[MAX_TAPS];
        for (int tap = args.taps - 1, from = i; tap >= 0; tap--) {
            inputs[tap] = from >= 0 ? rows.channels(from, shape) : rows.before(from, shape.row);
            for (int step = 0; step < args.dilation; step++) from = from >= 0 ? rows.parent(from) : from - 1;
        }
        float* out = rows.channels(i, shape);
        for (int c = begin; c < end; c += 16) {
            const int n = least(16, end - c);
            F16L sum = args.taps_bias ? load_some(args.taps_bias + c, n) : F16L::zero();
            for (int tap = 0; tap < args.taps; tap++)
                if (inputs[tap]) sum = load_some(args.conv + (size_t)tap * shape.channels + c, n).fma(load_some(inputs[tap] + c, n), sum);
            if (args.kind != CONV) sum = activate(sum, SILU);
            store_some(sum, n, out + c);
        }
    }
}

inline float dot(const float* a, const float* b, int size) {
    F16L sum = F16L::zero();
    for (int i = 0; i < size; i += 16) sum = load_some(a + i, least(16, size - i)).fma(load_some(b + i, least(16, size - i)), sum);
    return sum16(sum);
}

inline void scale(float* x, int size, float factor) {
    for (int i = 0; i < size; i++) x[i] *= factor;
}

// Normalizes keys and queries to unit length for the delta rule, and computes their products.
inline void normalize_keys(const RecurrentArgs& args, const RecurrentShape& shape, const Rows& rows, int i) {
    float* line = rows.channels(i, shape);
    const int size = args.key_size;
    for (int g = 0; g < args.key_heads; g++) {
        float *q = line + shape.q + g * size, *k = line + shape.k + g * size;
        if (args.kind == DELTA) {
            scale(q, size, 1.f / std::sqrt(dot(q, q, size) + KEY_EPS) / std::sqrt((float)size));
            scale(k, size, 1.f / std::sqrt(dot(k, k, size) + KEY_EPS));
        }
        rows.dots[(size_t)i * args.key_heads + g] = dot(q, k, size);
    }
}

thread_local Scratch saved_columns;  // for a thread's current task: states that later rows of a tree continue

// An update of sixteen columns of a head's state (K, 16) by a row: decays times the state, plus k d'.
struct Columns {
    const float* k;
    const float* decays;  // (K), or a single one
    F16L d;
    bool each;  // whether each key channel has a decay

    F16L next(F16L s, int i) const { return F16L::set1(k[i]).fma(d, s * F16L::set1(decays[each ? i : 0])); }
};

// Processors fetch ahead within a page only: lines of a state are asked for a page before they are used.
constexpr int AHEAD = 64;

// Products of one or two vectors with the state `from`, or with `to`, the state after `add`. Each has four sums, for
// short dependency chains.
template <bool ADD, bool FIRST, bool SECOND>
inline void step_columns(const float* from, float* to, int size, const Columns& add, const float* a, const float* b, F16L& x, F16L& y) {
    F16L xs[4], ys[4];
    for (int j = 0; j < 4; j++) xs[j] = ys[j] = F16L::zero();
    int i = 0;
    auto take = [&](int i, int j) {
        __builtin_prefetch(from + 16 * (i + AHEAD), ADD);
        F16L s = F16L::load(from + 16 * i);
        if (ADD) {
            s = add.next(s, i);
            s.store(to + 16 * i);
        }
        if (FIRST) xs[j] = s.fma(F16L::set1(a[i]), xs[j]);
        if (SECOND) ys[j] = s.fma(F16L::set1(b[i]), ys[j]);
    };
    for (; i + 4 <= size; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) take(i + j, j);
    for (; i < size; i++) take(i, 0);
    x = (xs[0] + xs[1]) + (xs[2] + xs[3]);
    y = (ys[0] + ys[1]) + (ys[2] + ys[3]);
}

inline void add_columns(const float* from, float* to, int size, const Columns& add) {
    for (int i = 0; i < size; i++) add.next(F16L::load(from + 16 * i), i).store(to + 16 * i);
}

// All rows of a sequence for columns [16 block, ...) of a head; outputs replace the values.
struct Scan {
    const RecurrentArgs& args;
    const RecurrentShape& shape;
    const Rows& rows;
    int head, group, column, size, count;  // size: elements of a key; count: columns
    const float* now;                      // the state: in the cache or in `state`
    alignas(64) float state[16 * MAX_KEY];  // for this pass only
    alignas(64) float ka[MAX_KEY], qa[MAX_KEY];

    Scan(const RecurrentArgs& args, const RecurrentShape& shape, const Rows& rows, int head, int block)
        : args(args), shape(shape), rows(rows), head(head),
          group(args.tiled ? head % args.key_heads : head / (args.heads / args.key_heads)), column(16 * block), size(args.key_size),
          count(least(16, args.value_size - column)) {}

    // A row's update without `d`.
    Columns part(int i) const {
        const float* factors = rows.factors + (size_t)i * shape.factors;
        const int each = args.channel_decay ? size : 1;
        return {rows.channels(i, shape) + shape.k + group * size, factors + head * each, F16L::zero(), args.channel_decay != 0};
    }
    // Row i's update, after applying `pending`, which makes the state `next`; with SEEN, its output replaces its value.
    template <bool ADD, bool SEEN> Columns read(int i, const Columns& pending, float* next) {
        Columns add = part(i);
        float* line = rows.channels(i, shape);
        const float* q = line + shape.q + group * size;
        for (int j = 0; j < size; j++) {
            const float decay = add.decays[add.each ? j : 0];
            ka[j] = add.k[j] * decay;
            qa[j] = q[j] * decay;
        }
        F16L known = F16L::zero(), seen = known;
        if (args.kind == DELTA) step_columns<ADD, true, SEEN>(now, next, size, pending, ka, qa, known, seen);
        else if (SEEN) step_columns<ADD, false, true>(now, next, size, pending, ka, qa, known, seen);
        else if (ADD) add_columns(now, next, size, pending);
        if (ADD) now = next;
        float* at = line + shape.v + head * args.value_size + column;
        const F16L v = load_some(at, count);
        const float* factors = rows.factors + (size_t)i * shape.factors;
        const F16L strength = F16L::set1(factors[shape.factors - args.heads + head]);
        add.d = args.kind == DELTA ? (v - known) * strength : v * strength;
        if (!SEEN) return add;
        F16L out = F16L::set1(rows.dots[(size_t)i * args.key_heads + group]).fma(add.d, seen);
        if (args.skip) out = F16L::set1(args.skip[head]).fma(v, out);
        store_some(out, count, at);
        return add;
    }
    void run() {
        const StateSpan& span = *rows.owner;
        const int blocks = (args.value_size + 15) / 16;
        const size_t at = ((size_t)head * blocks + column / 16) * 16 * size;
        float* kept = span.to + at;
        now = span.from + at;
        if (!rows.fold && span.to != span.from) copy_floats(now, 16 * size, kept);
        auto place = [&](int i) { return i <= rows.fold ? kept : state; };  // place of the state after i rows
        Columns pending = {nullptr, nullptr, F16L::zero(), false};
        for (int i = 0; i < rows.linear; i++) {
            if (i < rows.waiting) pending = i ? read<true, false>(i, pending, place(i)) : read<false, false>(i, pending, nullptr);
            else pending = i ? read<true, true>(i, pending, place(i)) : read<false, true>(i, pending, nullptr);
        }
        if (rows.linear == rows.count) return;
        if (rows.linear) {
            add_columns(now, place(rows.linear), size, pending);
            now = place(rows.linear);
        }
        grow(16 * size);
    }
    // Computes a tree's rows. States that later rows continue are saved.
    void grow(int numbers) {
        const int first = rows.linear, nodes = rows.count - first;
        float* saved = scratch<float>(saved_columns, (size_t)(nodes + 1) * numbers);
        copy_floats(now, numbers, saved);  // the state before the tree
        if (now != state) copy_floats(saved, numbers, state);
        now = state;
        const Columns none = {nullptr, nullptr, F16L::zero(), false};
        int at = first - 1;  // the last row in `state`
        for (int i = first; i < rows.count; i++) {
            if (!rows.wanted(i)) continue;
            const int parent = rows.parent(i);
            if (parent != at) copy_floats(saved + (size_t)(parent - first + 1) * numbers, numbers, state);
            at = parent;
            const Columns add = read<false, true>(i, none, nullptr);
            bool next = false, later = false;
            for (int child = i + 1; child < rows.count; child++)
                if (rows.wanted(child) && rows.parent(child) == i) (child == i + 1 && !next ? next : later) = true;
            if (!next && !later) continue;
            add_columns(state, state, size, add);
            at = i;
            if (later) copy_floats(state, numbers, saved + (size_t)(i - first + 1) * numbers);
        }
    }
};

// Applies norm and gate to numbers [begin, end) of a new row's result, whole blocks of the norm.
inline void finish_row(const RecurrentArgs& args, const RecurrentShape& shape, const float* line, int begin, int end, float* out) {
    const float *gates = line + shape.gates_at, *seen = line + shape.channels_at + shape.v;
    auto gate = [&](const float* x) {
        for (int j = begin; j < end; j += 16) {
            const int n = least(16, end - j);
            const F16L g = load_some(gates + j, n);
            const F16L factor = args.kind == CONV ? g : args.gate_sigmoid ? sigmoid16(g) : activate(g, SILU);
            store_some(load_some(x + j, n) * factor, n, out + j);
        }
    };
    auto norm = [&](const float* x) {
        for (int j = begin; j < end; j += args.norm_size)
            rms_norm(x + j, args.out_norm + j % args.norm_width, args.norm_eps, args.norm_size, out + j);
    };
    if (!args.norm_size) return gate(seen);
    if (args.gate_first) {
        gate(seen);
        norm(out);
    } else {
        norm(seen);
        gate(out);
    }
}

// Multiplies the columns of rows (R, width) from `from` on by `stack`; results go to the columns from `to` on.
inline void widen(Context& context, const Stack& stack, float* wide, int rows, int width, int from, int to) {
    float* low = scratch<float>(context.joined, (size_t)rows * stack.cols);
    for (int row = 0; row < rows; row++) copy_floats(wide + (size_t)row * width + from, stack.cols, low + (size_t)row * stack.cols);
    const Acts acts = prepare(context, context.rows, low, nullptr, rows, nullptr, 0, stack);
    matmul(context, stack, acts, wide + to, width);
}

// All sequences of a pass, and for each row its sequence and its index there. `wide` (R, width) has the projected rows,
// `joined` (R, inner) their results.
struct Sequences {
    Rows* list;
    int *owners, *numbers, all;

    Sequences(Context& context, const RecurrentArgs& args, const RecurrentShape& shape, float* wide, float* joined) : all(0) {
        int waiting = 0;
        for (int s = 0; s < args.span_count; s++) {
            const StateSpan& span = args.spans[s];
            waiting += span.held - span.position;
            all += span.held - span.position + span.rows;
        }
        float* past = scratch<float>(context.gated, (size_t)waiting * shape.row + (size_t)all * (shape.factors + args.key_heads));
        float *factors = past + (size_t)waiting * shape.row, *dots = factors + (size_t)all * shape.factors;
        list = scratch<Rows>(context.places, args.span_count);
        owners = scratch<int>(context.tasks, 2 * (size_t)all);
        numbers = owners + all;
        int row = 0, fresh = 0;
        for (int s = 0; s < args.span_count; s++) {
            const StateSpan& span = args.spans[s];
            const int old = span.held - span.position, count = old + span.rows;
            list[s] = {&span, past, wide + (size_t)fresh * shape.width, factors + (size_t)row * shape.factors,
                       dots + (size_t)row * args.key_heads, joined + (size_t)fresh * shape.inner, old, count,
                       span.parents ? old - span.extra : count, span.fold - span.position};
            for (int i = 0; i < count; i++) owners[row + i] = s, numbers[row + i] = i;
            past += (size_t)old * shape.row;
            row += count;
            fresh += span.rows;
        }
    }
};

// Caches all rows, then convolves them.
inline void keep_and_convolve(Context& context, const RecurrentArgs& args, const RecurrentShape& shape, const Rows* list) {
    for (int s = 0; s < args.span_count; s++) keep_rows(shape, list[s], 0, shape.row);
    const int piece = 128, pieces = (shape.channels + piece - 1) / piece;
    parallel(context, args.span_count * pieces, [&](int task) {
        const int begin = task % pieces * piece;
        convolve(args, shape, list[task / pieces], begin, least(shape.channels, begin + piece));
    });
}

// A single row as one list of tasks: projections of what all heads need, then those of some heads (or channels) at a time,
// their states, and the output. Whoever ends heads' projections convolves them, who ends their states finishes the result.
struct RowRecurrence {
    const RecurrentArgs& args;
    const RecurrentShape& shape;
    int part, parts, channels;  // numbers of the result in a part; what a part projects of them
    bool whole;                 // the norm is over more than a part

    RowRecurrence(const RecurrentArgs& args, const RecurrentShape& shape)
        : args(args), shape(shape), part(args.kind == CONV ? 256 : most(1, 256 / args.value_size) * args.value_size),
          parts((shape.inner + part - 1) / part), channels(args.kind == CONV ? 3 : 2), whole(args.norm_size > part || (args.norm_size && part % args.norm_size)) {}

    bool fits(const Context& context) const {
        bool fits = args.rows == 1 && args.span_count == 1 && !args.spans->parents && !context.adapters.rows && !shape.rank;
        fits &= (shape.channels_at | shape.gates_at | shape.strengths_at | shape.v | part | (args.kind == CONV ? 0 : 2 * shape.keys)) % 16 == 0 && shape.inner % 32 == 0;
        fits &= part % most(32, args.proj.hadamard) == 0 && shape.inner % most(32, args.proj.hadamard) == 0;
        return fits && !any_plain(args.proj) && whole_tiles(args.mix);
    }
    int end_of(int p) const { return least(shape.inner, (p + 1) * part); }
    // Columns of the projection: of a part's values, gates or inputs.
    int column(int p, int which) const {
        const int first[3] = {shape.channels_at + shape.v, shape.gates_at, 0};
        return first[which] + p * part;
    }
    void adjust(float* line, int begin, int end) const {
        for (int i = begin; i < end && args.mix_bias; i++) line[i] += args.mix_bias[i];
        for (int i = begin; i < end && args.mix_scale; i++) line[i] *= args.mix_scale[i];
    }
    // Channels [begin, end), which are projected: reads the waiting rows', caches the new row's and convolves them.
    void take(const Rows& rows, int begin, int end) const {
        for (int i = 0; i < rows.waiting; i++) rows.take_channels(i, shape, begin, end);
        keep_rows(shape, rows, begin, end);
        convolve(args, shape, rows, begin, end);
    }
    void run(Context& context) const {
        float *line = scratch<float>(context.wide, shape.width), *joined = scratch<float>(context.joined, shape.inner);
        const Rows& rows = *Sequences(context, args, shape, line, joined).list;
        Acts results = reserve(context.inner, joined, 1, args.proj);
        begin_groups(context.inner, results);
        RowInput input(args.mix);
        const Shares shares(context, context.more_tasks, args.proj, 0);
        struct Part { Countdown projected, taken, scanned; };
        Part* of = scratch<Part>(context.partial, parts);
        const bool states = args.kind != CONV;
        const int blocks = states ? (args.value_size + 15) / 16 : 0, pieces = (blocks + 3) / 4;  // tasks of a head's state
        const int heads = states ? part / args.value_size : 0, scans = states ? heads * pieces : 1;
        for (int p = 0; p < parts; p++) of[p] = {{channels}, {1}, {states ? (end_of(p) - p * part) / args.value_size * pieces : 1}};
        // Keys and queries, then strengths and decays, in pieces of eight tiles.
        const int keys = shape.channels_at + least(shape.q, shape.k), key_tiles = states ? 2 * shape.keys / 16 : 0;
        const int last_tiles = states ? (shape.width - shape.strengths_at + 15) / 16 : 0, key_tasks = (key_tiles + 7) / 8;
        const int commons = key_tasks + (last_tiles + 7) / 8;
        Countdown projected = {commons}, common = {commons > 0}, left = {parts};
        auto project_common = [&](int task) {
            const bool key = task < key_tasks;
            const int at = (key ? task : task - key_tasks) * 8, tile = (key ? keys : shape.strengths_at) / 16 + at;
            input.multiply(tile, least(8, (key ? key_tiles : last_tiles) - at), line);
            if (!projected.finish()) return;
            adjust(line, keys, keys + 2 * shape.keys);
            adjust(line, shape.strengths_at, shape.width);
            for (int i = 0; i < rows.waiting; i++) rows.take_factors(i, shape);
            make_factors(args, shape, line, rows.factors + (size_t)rows.waiting * shape.factors);
            take(rows, least(shape.q, shape.k), least(shape.q, shape.k) + 2 * shape.keys);
            keep_rows(shape, rows, shape.channels, shape.row);
            for (int i = 0; i < rows.count; i++) normalize_keys(args, shape, rows, i);
            common.finish();
        };
        auto project = [&](int p, int which) {
            const int begin = p * part, end = end_of(p), first = column(p, which);
            input.multiply(first / 16, (end - begin + 15) / 16, line);
            adjust(line, first, first + end - begin);
            if (!of[p].projected.finish()) return;
            for (int c = begin; c < end && !states; c++) line[shape.channels_at + c] *= line[c];
            take(rows, shape.v + begin, shape.v + end);
            of[p].taken.finish();
        };
        auto scan = [&](int p, int task) {
            const int begin = p * part, end = end_of(p), head = begin / most(1, args.value_size) + task / most(1, pieces);
            of[p].taken.wait();
            if (states) {
                if (head >= args.heads) return;
                common.wait();
                const int first = task % pieces * 4;
                for (int block = first; block < least(first + 4, blocks); block++) Scan(args, shape, rows, head, block).run();
            }
            if (!of[p].scanned.finish()) return;
            if (!whole) return finish(line, begin, end, joined, results);
            if (left.finish()) finish(line, 0, shape.inner, joined, results);
        };
        if (whole) context.pool.meet();
        parallel(context, 1 + commons + parts * (channels + scans) + shares.count, [&](int task) {
            if (task == 0) return input.read(context, context.rows, args.x, args.norm, args.eps);
            if (--task < commons) return project_common(task);
            if ((task -= commons) < parts * channels) return project(task / channels, task % channels);
            if ((task -= parts * channels) < parts * scans) return scan(task / scans, task % scans);
            multiply_share(args.proj, shares.list[task - parts * scans], results, args.out);
        });
    }
    void finish(const float* line, int begin, int end, float* joined, const Acts& results) const {
        finish_row(args, shape, line, begin, end, joined);
        if (args.proj.hadamard) block_hadamard(joined + begin, end - begin, args.proj.hadamard);
        quantize_row(results, Runs(1), 0, joined + begin, begin, end - begin);
    }
};

void recurrent(Context& context, const RecurrentArgs& args) {
    const RecurrentShape shape(args);
    const RowRecurrence alone(args, shape);
    if (alone.fits(context)) {
        alone.run(context);
        return finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.eps);
    }
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.mix);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * shape.width);
    matmul(context, args.mix, acts, wide, shape.width);
    if (shape.rank) {
        widen(context, args.gate_up, wide, args.rows, shape.width, shape.channels, shape.gates_at);
        widen(context, args.decay_up, wide, args.rows, shape.width, shape.strengths_at + args.heads, shape.decays_at);
    }
    finish_rows(context, wide, args.rows, shape.width, args.mix_bias, nullptr, 0);
    if (args.mix_scale)
        parallel(context, args.rows, [&](int row) {
            for (int i = 0; i < args.mix.rows; i++) wide[(size_t)row * shape.width + i] *= args.mix_scale[i];
        });
    float* joined = scratch<float>(context.joined, (size_t)args.rows * shape.inner);
    const Sequences sequences(context, args, shape, wide, joined);
    const int all = sequences.all, *owners = sequences.owners, *numbers = sequences.numbers;
    const Rows* list = sequences.list;
    each_row<8>(context, all, [&](int row) {
        const Rows& rows = list[owners[row]];
        const int i = numbers[row];
        if (i < rows.waiting) return rows.take_kept(i, shape);
        float* projected = rows.fresh + (size_t)(i - rows.waiting) * shape.width;
        if (args.kind == CONV)
            for (int c = 0; c < shape.inner; c++) projected[shape.channels_at + c] *= projected[c];
        else
            make_factors(args, shape, projected, rows.factors + (size_t)i * shape.factors);
    });
    keep_and_convolve(context, args, shape, list);
    if (args.kind != CONV) {
        each_row<8>(context, all, [&](int row) { normalize_keys(args, shape, list[owners[row]], numbers[row]); });
        const int blocks = (args.value_size + 15) / 16, parts = (blocks + 3) / 4;
        parallel(context, args.span_count * args.heads * parts, [&](int task) {
            const int first = task % parts * 4;
            for (int block = first; block < least(first + 4, blocks); block++)
                Scan(args, shape, list[task / (args.heads * parts)], task / parts % args.heads, block).run();
        });
    }
    each_row<8>(context, args.rows, [&](int row) {
        finish_row(args, shape, wide + (size_t)row * shape.width, 0, shape.inner, joined + (size_t)row * shape.inner);
    });
    linear(context, args.proj, joined, args.rows, args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.eps);
}

}  // namespace
