// Computes all experts of a layer that a pass needs, in one call: rows are gathered by expert and quantized; then all
// experts' gates and ups are one queue of tasks, and all downs another. A row's bits do not depend on other rows.
#pragma once

inline namespace LRT_SPACE {

// The `rows` rows from row `at` on of shared acts.
inline Acts rows_from(const Acts& all, size_t at, int rows) {
    Acts acts = all;
    const size_t groups = at * (all.cols / 32);
    acts.rows = rows;
    if (all.ready) acts.ready += groups;
    if (!all.codes) return acts;
    acts.codes += groups * 32;
    acts.meta += groups * 2;
    for (int i = 0; i < acts.start_count; i++) acts.starts[i].values += groups * acts.starts[i].halves;
    return acts;
}

// Copies the codes of `rows` single rows in `from` to a run of `to`, whose last row may be padding.
inline void join_run(const Acts& from, const size_t* rows, const Acts& to, const Runs& runs, RowRun run) {
    const int groups = to.cols / 32, count = least(run.size, runs.rows - run.start);
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < count; i++) {
            const size_t source = rows[i] * groups + g, at = runs.at(run, g, groups) + i;
            __builtin_memcpy(to.codes + at * 32, from.codes + source * 32, 32);
            copy_floats(from.meta + source * 2, 2, to.meta + at * 2);
            for (int s = 0; s < to.start_count; s++) {
                const int halves = to.starts[s].halves;
                for (int h = 0; h < halves; h++) to.starts[s].values[at * halves + h] = from.starts[s].values[source * halves + h];
            }
        }
    if (count < run.size) quantize_row(to, runs, run.start + count, nullptr, 0, to.cols);
}

// An expert of the call and its rows.
struct Busy {
    const Expert* expert;
    int rows, first;        // `first`: index of its first row among all experts' rows, each padded to whole runs
    int rotation;           // index of the rotation of its inputs
    bool gated;             // gated values are quantized directly
    Halves halves;
    Acts in, inner;
    float *wide, *values;   // if values are not quantized directly: (rows, 2F or F), (rows, F)
    const int32_t* slots;   // slots of its rows
};

constexpr int ROTATIONS = 5;  // none, 16, 32, 64, 128

inline int rotation_of(int hadamard) {
    int index = 0;
    for (; hadamard >= 16; hadamard /= 2) index++;
    return index;
}

// All experts of a call.
struct Crowd {
    const ExpertArgs& args;
    Busy* busy;
    int count, missing, total;  // `total`: rows including padding of runs
    int32_t *of, *place;        // an expert's index here, or -1; a slot's index among its expert's rows
    int32_t* slots;
    int hidden, inner;
    bool gates;                 // whether the activation is gated

    Crowd(Context& context, const ExpertArgs& args) : args(args), count(0), missing(-1), total(0), hidden(0), inner(0), gates(has_gate(args.activation)) {
        const int every = args.rows * args.used;
        of = scratch<int32_t>(context.places, (size_t)2 * args.count + 2 * every);
        int32_t* loads = of + args.count;
        place = loads + args.count;
        slots = place + every;
        for (int e = 0; e < args.count; e++) of[e] = args.asked ? -1 : 0, loads[e] = 0;
        for (int i = 0; i < args.asked_count; i++) {
            const int e = args.asked[i];
            if (!known(e)) return;
            of[e] = 0;
        }
        for (int slot = 0; slot < every; slot++) {
            const int e = at(slot);
            if (e < 0 || e >= args.count || (of[e] == 0 && !known(e))) {
                missing = e < 0 ? args.count : e;
                return;
            }
            place[slot] = loads[e]++;
        }
        busy = scratch<Busy>(context.crowd, least(args.count, every));
        int first_slot = 0;
        for (int e = 0; e < args.count; e++) {
            const bool works = of[e] == 0 && loads[e];
            of[e] = works ? count : -1;
            if (!works) continue;
            Busy& b = busy[count++];
            b.expert = args.table + e;
            b.rows = loads[e];
            b.first = total;
            b.slots = slots + first_slot;
            b.rotation = rotation_of(b.expert->gate_up.hadamard);
            b.gated = gates && can_gate(b.expert->gate_up, b.expert->down, b.halves);
            total += Runs(b.rows).padded();
            first_slot += b.rows;
        }
        for (int slot = 0; slot < every; slot++)
            if (const Busy* b = find(slot)) const_cast<int32_t*>(b->slots)[place[slot]] = slot;
        if (count) hidden = busy[0].expert->gate_up.cols, inner = busy[0].expert->down.cols;
    }
    bool known(int e) {
        const bool there = e >= 0 && e < args.count && args.table[e].gate_up.count;
        if (!there) missing = e < 0 ? args.count : e;
        return there;
    }
    size_t ups() const { return gates ? inner : 0; }     // offset of ups in a row
    size_t width() const { return inner + ups(); }
    int at(int slot) const { return args.chosen[(size_t)(slot / args.used) * args.stride + slot % args.used]; }
    // The expert of a slot, or null if it is not computed.
    const Busy* find(int slot) const {
        const int index = of[at(slot)];
        return index < 0 ? nullptr : busy + index;
    }
};

// Quantizes the rows of every expert. A row is quantized once for all its experts; an expert with a single row uses it
// without a copy.
inline void gather(Context& context, Crowd& crowd) {
    const ExpertArgs& args = crowd.args;
    const int cols = crowd.hidden, rows = args.rows;
    Acts all = {nullptr, nullptr, nullptr, {}, 0, 0, cols};
    bool packed = false, plain = false, rotated[ROTATIONS] = {};
    for (int i = 0; i < crowd.count; i++) {
        const Busy& b = crowd.busy[i];
        packed |= note_starts(b.expert->gate_up, all);
        plain |= any_plain(b.expert->gate_up);
        rotated[b.rotation] = true;
    }
    int lone[ROTATIONS], singles = 0;  // start of the single rows of each rotation
    for (int i = 0; i < ROTATIONS; i++) {
        lone[i] = singles;
        if (rotated[i]) singles += rows;
    }
    if (packed) reserve_groups(context.rows, (size_t)(singles + crowd.total) * (cols / 32), all);
    float* floats = plain ? scratch<float>(context.joined, (size_t)crowd.total * cols) : nullptr;
    float* turned = singles > (rotated[0] ? rows : 0) ? scratch<float>(context.rows.normed, (size_t)singles * cols) : nullptr;
    for (int i = 0; i < crowd.count; i++) {
        Busy& b = crowd.busy[i];
        b.in = rows_from(all, singles + b.first, b.rows);
        if (plain) b.in.x = floats + (size_t)b.first * cols;
    }
    parallel(context, rows, [&](int row) {
        const float* x = args.x + (size_t)row * cols;
        bool ready[ROTATIONS] = {};
        for (int slot = row * args.used; slot < (row + 1) * args.used; slot++) {
            const Busy* b = crowd.find(slot);
            if (!b) continue;
            const int at = lone[b->rotation] + row;
            const float* from = b->rotation ? turned + (size_t)at * cols : x;
            if (!ready[b->rotation]) {
                ready[b->rotation] = true;
                if (b->rotation) {
                    copy_floats(x, cols, turned + (size_t)at * cols);
                    block_hadamard(turned + (size_t)at * cols, cols, b->expert->gate_up.hadamard);
                }
                if (packed) quantize_row(rows_from(all, at, 1), Runs(1), 0, from, 0, cols);
            }
            if (plain) copy_floats(from, cols, floats + (size_t)(b->first + crowd.place[slot]) * cols);
        }
    });
    if (!packed) return;
    // Tasks are whole experts, so that no two threads write to one cache line.
    parallel(context, rows == 1 ? 0 : crowd.count, [&](int index) {
        const Busy& b = crowd.busy[index];
        if (b.rows == 1) return;
        const Runs runs(b.rows);
        size_t from[most(MOST_RUN, DIRECT_ROWS)];
        for (int i = 0; i < runs.count; i++) {
            const RowRun run = runs[i];
            for (int row = 0; row < run.size && run.start + row < b.rows; row++)
                from[row] = lone[b.rotation] + b.slots[run.start + row] / args.used;
            join_run(all, from, b.in, runs, run);
        }
    });
    for (int i = 0; i < crowd.count; i++) {
        Busy& b = crowd.busy[i];
        if (b.rows > 1) continue;
        const float* x = b.in.x;
        b.in = rows_from(all, lone[b.rotation] + b.slots[0] / args.used, 1);
        b.in.x = x;
    }
}

// Where gated values are stored.
inline void reserve_inner(Context& context, Crowd& crowd) {
    Acts all = {nullptr, nullptr, nullptr, {}, 0, 0, crowd.inner};
    bool packed = false;
    int loose = 0;  // rows of experts whose values are not quantized directly
    for (int i = 0; i < crowd.count; i++) {
        packed |= note_starts(crowd.busy[i].expert->down, all);
        if (!crowd.busy[i].gated) loose += crowd.busy[i].rows;
    }
    if (packed) reserve_groups(context.inner, (size_t)crowd.total * (crowd.inner / 32), all);
    float* wide = scratch<float>(context.wide, loose * crowd.width());
    float* values = crowd.gates ? scratch<float>(context.gated, (size_t)loose * crowd.inner) : wide;
    for (int i = 0; i < crowd.count; i++) {
        Busy& b = crowd.busy[i];
        b.inner = rows_from(all, b.first, b.rows);
        if (b.gated) continue;
        b.wide = wide, b.values = values, b.inner.x = values;
        wide += b.rows * crowd.width();
        values += (size_t)b.rows * crowd.inner;
    }
}

// Some tiles of an expert's matrix for a chunk of its rows; part -1 is gate and up together.
struct Portion { int busy, part, column, tile, tiles, chunk; };

// Calls fn(part, tiles, unit, column) for an expert's matrices of one step.
template <class Fn> inline void each_part(const Busy& b, bool down, Fn fn) {
    if (!down && b.gated) return fn(-1, tiles_of(b.halves.gate), gated_unit(b.expert->down), 0);
    const Stack& stack = down ? b.expert->down : b.expert->gate_up;
    for (int part = 0, column = 0; part < stack.count; column += stack.parts[part++].rows) fn(part, tiles_of(stack.parts[part]), 1, column);
}

// The tasks of a step of all experts: those with many rows first, then those limited by reading.
inline int cut(Context& context, const Crowd& crowd, bool down, Portion*& portions) {
    size_t most_portions = 0;
    int left[2] = {0, 0};
    for (int i = 0; i < crowd.count; i++) {
        const Busy& b = crowd.busy[i];
        each_part(b, down, [&](int, int tiles, int, int) {
            most_portions += (size_t)tiles * Chunks(Runs(b.rows)).count;
            left[b.rows > DIRECT_ROWS] += tiles;
        });
    }
    portions = scratch<Portion>(context.tasks, most_portions);
    int count = 0;
    for (int panels = 1; panels >= 0; panels--)
        for (int i = 0; i < crowd.count; i++) {
            const Busy& b = crowd.busy[i];
            if ((b.rows > DIRECT_ROWS) != panels) continue;
            const Runs runs(b.rows);
            const int chunks = Chunks(runs).count, at_once = tiles_at_once((b.rows + chunks - 1) / chunks);
            each_part(b, down, [&](int part, int tiles, int unit, int column) {
                for (int tile = 0; tile < tiles;) {
                    int step = next_tiles(context, left[panels], panels ? at_once : 0);
                    if (panels && part < 0) step = least(step, at_once / 2);
                    step = least((step + unit - 1) / unit * unit, tiles - tile);
                    for (int chunk = 0; chunk < chunks; chunk++) portions[count++] = {i, part, column, tile, step, chunk};
                    tile += step;
                    left[panels] -= step;
                }
            });
        }
    return count;
}

inline void multiply_portions(Context& context, const Crowd& crowd, bool down) {
    const ExpertArgs& args = crowd.args;
    Portion* portions;
    const int count = cut(context, crowd, down, portions);
    parallel(context, count, [&](int index) {
        const Portion& portion = portions[index];
        const Busy& b = crowd.busy[portion.busy];
        const Expert& expert = *b.expert;
        const Runs runs(b.rows);
        const RunRange range = Chunks(runs)[portion.chunk];
        if (portion.part < 0) {
            const float* bias = expert.gate_up_bias;
            const Gated target = {b.inner, {args.activation, args.limit}, expert.down.hadamard, bias, bias ? bias + crowd.inner : nullptr};
            return multiply_gated(b.halves, portion.tile, portion.tiles, gated_unit(expert.down), b.in, runs, range, target);
        }
        const Matrix& m = (down ? expert.down : expert.gate_up).parts[portion.part];
        Target target = {b.wide + portion.column, crowd.width(), m.rows, m.scale, nullptr, nullptr};
        if (down) {
            const float* bias = expert.down_bias ? expert.down_bias + portion.column : nullptr;
            target = {args.slots + portion.column, (size_t)crowd.hidden, m.rows, m.scale, bias, b.slots};
        }
        multiply(m, portion.tile, portion.tiles, down ? b.inner : b.in, runs, range, target);
    });
}

// Activation and quantization of experts that cannot be gated directly: ungated, of different formats, or with too wide
// a rotation.
inline void gate_loose(Context& context, const Crowd& crowd) {
    struct Line { int busy, row; };
    Line* lines = scratch<Line>(context.tasks, crowd.total);
    int count = 0;
    for (int i = 0; i < crowd.count; i++)
        for (int row = 0; !crowd.busy[i].gated && row < crowd.busy[i].rows; row++) lines[count++] = {i, row};
    const int inner = crowd.inner;
    parallel(context, count, [&](int index) {
        const Busy& b = crowd.busy[lines[index].busy];
        const int row = lines[index].row, hadamard = b.expert->down.hadamard;
        const float *wide = b.wide + row * crowd.width(), *bias = b.expert->gate_up_bias;
        float* values = b.values + (size_t)row * inner;
        gate_row(wide, wide + crowd.ups(), 0, inner, {crowd.args.activation, crowd.args.limit}, bias, bias ? bias + crowd.ups() : nullptr, values);
        if (hadamard) block_hadamard(values, inner, hadamard);
        if (!b.inner.codes) return;
        const Runs runs(b.rows);
        quantize_row(b.inner, runs, row, values, 0, inner);
        if (row == b.rows - 1 && runs.padded() > b.rows) quantize_row(b.inner, runs, b.rows, nullptr, 0, inner);
    });
}

// Returns -1, or an expert that is not in the table; then nothing is computed.
int run_experts(Context& context, const ExpertArgs& args) {
    Crowd crowd(context, args);
    if (crowd.missing >= 0 || crowd.count == 0) return crowd.missing;
    gather(context, crowd);
    reserve_inner(context, crowd);
    multiply_portions(context, crowd, false);
    gate_loose(context, crowd);
    multiply_portions(context, crowd, true);
    return -1;
}

// Columns [begin, end) of a row: slots (K, D) times their weights in the order of k, then `shared` times `factor`, which may
// be `out`.
inline void combine_columns(const CombineArgs& args, int row, int begin, int end, float factor) {
    for (int i = begin; i < end; i += 16) {
        const int n = least(16, end - i);
        F16L sum = F16L::zero();
        for (int k = 0; k < args.used; k++) {
            const size_t slot = (size_t)row * args.used + k;
            sum = load_some(args.slots + slot * args.cols + i, n).fma(F16L::set1(args.weights[slot]), sum);
        }
        const size_t at = (size_t)row * args.cols + i;
        if (args.shared) sum = sum + load_some(args.shared + at, n) * F16L::set1(factor);
        store_some(sum, n, args.out + at);
    }
}

void combine_experts(Context& context, const CombineArgs& args) {
    const int share = most(1, 8192 / args.cols);
    parallel(context, (args.rows + share - 1) / share, [&](int task) {
        for (int row = task * share; row < least(args.rows, (task + 1) * share); row++) combine_columns(args, row, 0, args.cols, 1.f);
    });
}

// Whether two experts' matrices differ in nothing but their numbers.
inline bool alike(const Stack& a, const Stack& b) {
    bool same = a.count == b.count && a.hadamard == b.hadamard;
    for (int i = 0; same && i < a.count; i++) {
        const Matrix &m = a.parts[i], &n = b.parts[i];
        same = m.layout == n.layout && m.span == n.span && m.rows == n.rows;
    }
    return same;
}

// A single row's mixture as one list of tasks: norm and router, the shared expert's gates and ups, those of the chosen
// experts, all downs, and the sum. Threads wait for each other where experts are chosen, and may read the shared expert
// meanwhile. Tasks are divided before that, as if all experts were like the first.
struct RowMixture {
    static constexpr int PIECE = 16;  // tiles of the sum that are added at once
    Context& context;
    const RouteArgs& route;
    const ExpertArgs& args;
    const CombineArgs& sum;
    RowMlp* shared;  // or null
    const Expert& like;
    const int used, inner, unit, units, downs;  // units of gated tiles and tiles of downs, of an expert
    const Router router;
    RowInput seen, row;      // what the router sees, and the experts
    Acts values;             // what the experts' downs read (used)
    float *products, *work;  // the router's
    int* edges;              // of the experts' tasks: units of gates, then tiles of downs, numbered through all of them
    int tasks = 0;
    float factor = 1.f;      // of the shared expert
    bool usable = true;      // the chosen experts are there, and like the first
    Countdown normed = {1}, routing, routed = {1};
    Countdown* left;         // what is missing in each piece of the sum

    RowMixture(Context& context, const RouteArgs& route, RowMlp* shared, const ExpertArgs& args, const CombineArgs& sum)
        : context(context), route(route), args(args), sum(sum), shared(shared), like(args.table[0]), used(args.used),
          inner(like.down.cols), unit(gated_unit(like.down)), units(inner / 16 / unit), downs(tiles_of(like.down)), router(route),
          seen(route.gate), row(like.gate_up), values{nullptr, nullptr, nullptr, {}, 0, 0, inner}, routing{tiles_of(route.gate)} {
        note_starts(like.down, values);
        reserve_groups(context.inner, (size_t)used * (inner / 32), values);
        begin_groups(context.inner, values, used);
        products = scratch<float>(context.gated, route.gate.rows);
        work = scratch<float>(context.wide, router.room());
        edges = scratch<int>(context.more_tasks, used * (units + downs) + 1);
        const int ends[2] = {used * units, used * (units + downs)};
        for (int at = edges[0] = 0, down = 0; down < 2; down++)
            while (at < ends[down]) edges[++tasks] = at += next_tiles(context, ends[down] - at, 0);
        const int pieces = (downs + PIECE - 1) / PIECE;
        left = scratch<Countdown>(context.places, pieces);
        for (int p = 0; p < pieces; p++) left[p] = {least(PIECE, downs - p * PIECE) * (used + (shared != nullptr))};
    }
    void norm() {
        norm_routed(route, 0);
        normed.finish();
        seen.read(context, context.rows, route.gate_norm ? route.x : route.normed, route.gate_norm, route.eps, true);
    }
    void quantize() {
        normed.wait();
        row.read(context, context.chosen, args.x, nullptr, 0);
    }
    void read_shared() {
        const MlpArgs& mlp = shared->args;
        if (mlp.row_gate.count) {
            const Acts acts = prepare(context, context.shared_rows, mlp.x, nullptr, 1, mlp.norm, mlp.eps, mlp.row_gate);
            multiply_tiles(mlp.row_gate, 0, 1, acts, &factor);
            factor = sigmoid1(factor);
        }
        shared->read(context, context.shared_rows);
    }
    void choose(int tile) {
        seen.multiply(tile, 1, products);
        if (!routing.finish()) return;
        router.choose(products, 0, work);
        for (int k = 0; k < used; k++) {
            const int e = args.chosen[k];
            usable = usable && e >= 0 && e < args.count && alike(args.table[e].gate_up, like.gate_up) && alike(args.table[e].down, like.down);
        }
        routed.finish();
    }
    void compute(int task) {
        routed.wait();
        row.prepared.wait();
        for (int at = edges[task], end = edges[task + 1], count; at < end && usable; at += count) {
            const bool down = at >= used * units;
            const int each = down ? downs : units, first = down ? at - used * units : at, k = first / each, tile = first % each;
            count = least(each - tile, end - at);
            const Expert& expert = args.table[args.chosen[k]];
            if (down) multiply_down(expert, k, tile, count);
            else multiply_gates(expert, k, tile * unit, count * unit);
        }
    }
    void multiply_gates(const Expert& expert, int k, int tile, int tiles) {
        Halves halves;
        can_gate(expert.gate_up, expert.down, halves);
        const float* bias = expert.gate_up_bias;
        const Acts codes = rows_from(values, k, 1);
        const Gated to = {codes, {args.activation, args.limit}, expert.down.hadamard, bias, bias ? bias + inner : nullptr};
        multiply_gated(halves, tile, tiles, unit, row.acts, Runs(1), {0, 1}, to);
    }
    void multiply_down(const Expert& expert, int k, int tile, int tiles) {
        const Matrix& m = expert.down.parts[0];
        const Target to = {args.slots + (size_t)k * m.rows, 0, m.rows, m.scale, expert.down_bias, nullptr};
        const Acts codes = rows_from(values, k, 1);
        multiply(m, tile, tiles, codes, Runs(1), {0, 1}, to);
        add_up(tile, tiles);
    }
    // These tiles of an expert are done. Whoever ends a piece adds it up.
    void add_up(int tile, int tiles) {
        for (int end = tile + tiles, here; tile < end; tile += here) {
            const int piece = tile / PIECE;
            here = least(end, (piece + 1) * PIECE) - tile;
            if (left[piece].finish(here)) combine_columns(sum, 0, piece * PIECE * 16, least(sum.cols, (piece + 1) * PIECE * 16), factor);
        }
    }
    // Returns `usable`; otherwise only the choice has been computed.
    bool run() {
        const int prepares = shared ? 3 : 2, ranked = tiles_of(route.gate), gates = shared ? shared->count : 0;
        if (!shared) context.pool.meet();  // where experts are chosen
        parallel(context, prepares + ranked + gates + tasks + (shared ? downs : 0), [&](int task) {
            if (task < prepares) return task == 0 ? norm() : task == 1 ? quantize() : read_shared();
            if ((task -= prepares) < ranked) return choose(task);
            if ((task -= ranked) < gates) return shared->gate(task);
            if ((task -= gates) < tasks) return compute(task);
            multiply_tiles(shared->args.down, task - tasks, 1, shared->gated, shared->args.out);
            add_up(task - tasks, 1);
        });
        return usable;
    }
};

bool mixture_of_row(Context& context, const RouteArgs& route, const MlpArgs* shared, const ExpertArgs& args, const CombineArgs& sum) {
    const Expert& like = args.table[0];
    Halves halves;
    const bool one = args.rows == 1 && !args.asked && !context.adapters.rows && like.gate_up.count && like.down.count == 1;
    const bool linked = args.x == route.normed && args.chosen == route.experts && args.used == route.used &&
                        sum.slots == args.slots && sum.weights == route.weights && (!shared || sum.shared == shared->out);
    if (!one || !linked || !has_gate(args.activation) || !can_gate(like.gate_up, like.down, halves)) return false;
    if (!shared) return RowMixture(context, route, nullptr, args, sum).run();
    if (shared->down.count != 1 || shared->post_norm || !RowMlp::fits(*shared, halves)) return false;
    RowMlp beside(context, context.shared_inner, context.tasks, *shared, halves);
    return RowMixture(context, route, &beside, args, sum).run();
}

}  // namespace
