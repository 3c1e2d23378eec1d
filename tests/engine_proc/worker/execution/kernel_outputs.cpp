// Calls the kernels of an instruction set, and steps of small decoders, with random input.
//
// In: a number of `Isa`, or "avx2" or "avx2 with vnni", whose products alone are called. Out:
// records of "name bytes\n" and so many bytes, most of them floats. The input is the same
// everywhere, so records of two machines can be compared. Status 1, and names on stderr: a row's
// result depends on what it was computed with.
#include "random_matrices.h"

#include "collectives/rank_sums.h"
#include "cpu/kernels_avx_vnni.h"
#include "cpu/step.h"
#include "cpu/step_state.h"
#include "sampling/sampler_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <string>

using namespace headrace;

namespace {

int num_wrong = 0;

template <class T> void write(const std::string &name, const std::vector<T> &numbers) {
    std::printf("%s\t%zu\n", name.c_str(), numbers.size() * sizeof(T));
    std::fwrite(numbers.data(), sizeof(T), numbers.size(), stdout);
}

void check(bool is_right, const std::string &name) {
    if (!is_right) {
        std::fprintf(stderr, "%s\n", name.c_str());
        ++num_wrong;
    }
}

enum class Path { floats, rounded, int16, int8, fixed16 };

// A product of activations and a matrix, with some rows of the one and blocks of the other.
class Product {
public:
    Product(const Kernels &kernels, Path path, Format format, int cols, Random &random)
        : kernels_(kernels), path_(path), cols_(cols), stride_(padded(cols) + lanes),
          x_(random.numbers(size_t(num_rows) * stride_)), groups_(num_rows * groups_of(cols)) {
        fill(weight_, format, num_blocks * lanes, cols, random);
        panels_.allocate(room_of_panels(num_rows));
        std::fill_n(x_.begin() + 3 * stride_, stride_, 0.0f);
        std::vector<float> rounded(stride_);
        for (int row = 0; row < num_rows; ++row) {
            float *x = x_.data() + size_t(row) * stride_;
            if (path == Path::rounded) {
                kernels.round_row(x, cols, rounded.data());
                std::copy(rounded.begin(), rounded.end(), x);
            } else if (path == Path::fixed16) {
                kernels.round_to_fixed16(x, cols, rounded.data());
                std::copy(rounded.begin(), rounded.end(), x);
            } else if (path != Path::floats) {
                kernels.quantize_row(x, cols, rounding_of(format, path == Path::int8 ? 8 : 16),
                                     groups_.data() + row * groups_of(cols));
            }
        }
    }

    static constexpr int num_rows = 50, num_blocks = 7;

    std::vector<float> run(int row, int rows, int block, int blocks) const {
        std::vector<float> out(size_t(rows) * blocks * lanes, 99.0f);
        std::vector<float> decoded(decoded_blocks * (decoded_columns + 1) * lanes);
        const size_t bytes = block_bytes(weight_.format, cols_);
        const float *x = x_.data() + size_t(row) * stride_;
        const Operands o{weight_.block(block), bytes, cols_,         x, stride_, out.data(),
                         blocks * lanes,       false, prefetch_bytes};
        const Int16Operands integers{weight_.block(block), bytes,
                                     groups_of(cols_),     groups_.data() + row * groups_of(cols_),
                                     groups_of(cols_),     out.data(),
                                     blocks * lanes,       weight_.block(0)};
        if (path_ == Path::int8) {
            kernels_.gemm_int8(integers, rows, blocks, panels_.as<void>());
        } else if (path_ == Path::int16) {
            kernels_.gemm_int16(weight_.format, integers, rows, blocks, panels_.as<void>());
        } else if (path_ == Path::fixed16) {
            kernels_.gemm_fixed16(o, rows, blocks);
        } else if (path_ == Path::rounded && kernels_.gemm_bf16) {
            kernels_.gemm_bf16(o, rows, blocks, panels_.as<void>());
        } else {
            kernels_.gemm(weight_.format, o, rows, blocks, decoded.data());
        }
        return out;
    }

    void try_all(const std::string &name) const {
        const std::vector<float> whole = run(0, num_rows, 0, num_blocks);
        write(name, whole);
        for (int rows = 1; rows <= 33; rows += rows < 13 ? 1 : 4) {
            const int row = rows * 7 % (num_rows - rows), block = rows % 6;
            const int blocks = rows % 3 == 0 ? num_blocks - block : 1;
            const std::vector<float> part = run(row, rows, block, blocks);
            for (int m = 0; m < rows; ++m) {
                const size_t n = size_t(blocks) * lanes;
                const float *expected =
                    whole.data() + (size_t(row + m) * num_blocks + block) * lanes;
                check(std::memcmp(part.data() + m * n, expected, n * 4) == 0,
                      name + ": row " + std::to_string(m) + " of " + std::to_string(rows));
            }
        }
    }

private:
    const Kernels &kernels_;
    const Path path_;
    const int cols_, stride_;
    std::vector<float> x_;
    std::vector<Int16Group> groups_;
    Matrix weight_;
    Buffer panels_;
};

void try_products(const Kernels &kernels) {
    Random random(1);
    for (const Stored &kind : stored) {
        const bool has_groups = kind.numbers > 1;
        for (const int cols : kind.numbers == 256 ? std::vector<int>{512}
                              : has_groups        ? std::vector<int>{32, 288}
                                                  : std::vector<int>{1, 3, 34, 290}) {
            const std::string size = std::string(kind.name) + " " + std::to_string(cols);
            const auto try_path = [&](Path path, const std::string &name) {
                Product(kernels, path, kind.format, cols, random).try_all(name + " " + size);
            };
            if (kind.format == Format::int8) {
                try_path(Path::int16, "int16");
                try_path(Path::int8, "int8");
                continue;
            }
            if (kind.format == Format::fixed16) {
                try_path(Path::fixed16, "fixed16");
                continue;
            }
            try_path(Path::floats, "floats");
            if (kind.format == Format::bf16) {
                try_path(Path::rounded, "rounded");
            }
            if (packing_of(kind.format).unit != 0) {
                try_path(Path::int16, "int16");
            }
        }
    }
}

// What a group is but the order of its numbers.
void try_quantizing(const Kernels &kernels) {
    Random random(2);
    for (const Rounding to : {rounding_of(Format::int8, 8), rounding_of(Format::int8, 16),
                              rounding_of(Format::q6_k, 16)}) {
        std::vector<float> found;
        for (const int cols : {1, 31, 32, 90, 600}) {
            std::vector<float> x = random.numbers(cols);
            std::vector<Int16Group> groups(groups_of(cols));
            kernels.quantize_row(x.data(), cols, to, groups.data());
            for (const Int16Group &group : groups) {
                found.insert(found.end(), {group.scale, group.sum, group.first_sum});
                found.insert(found.end(), {float(group.offset), float(group.first_offset)});
            }
        }
        write("groups of " + std::to_string(to.most_steps), found);
    }
}

void try_norms(const Kernels &kernels, int n, Random &random) {
    const std::string size = " " + std::to_string(n);
    const std::vector<float> x = random.numbers(n), y = random.numbers(n);
    std::vector<float> out(n);
    for (const bool is_layer_norm : {false, true}) {
        kernels.norm(x.data(), y.data(), n, 1e-5f, is_layer_norm, out.data());
        write((is_layer_norm ? "layer norm" : "norm") + size, out);
    }
    write("squares" + size, std::vector<float>{kernels.squares(x.data(), n, 0.25f)});
    out = y;
    kernels.add(x.data(), 0.7f, n, out.data());
    write("add" + size, out);
    kernels.scale(x.data(), 0.3f, n, out.data());
    write("scale" + size, out);
    kernels.round_to_floats(x.data(), n, out.data());
    write("floats of bf16" + size, out);
    std::vector<float> head = random.numbers(2 * n);
    kernels.rotate(head.data(), n, false, x.data(), y.data());
    write("rotate" + size, head);
    kernels.rotate(head.data(), n, true, x.data(), y.data());
    write("rotate pairs" + size, head);
    const ConvTap taps[] = {{y.data(), x.data(), nullptr}, {x.data(), y.data(), x.data()}};
    out = y;
    kernels.convolve(taps, 2, x.data(), n, out.data());
    write("convolve" + size, out);
    kernels.sigmoid_gate(x.data(), n, out.data());
    write("sigmoid gate" + size, out);
    const ConvTap ungated[] = {{y.data(), x.data(), nullptr}, {x.data(), y.data(), nullptr}};
    kernels.convolve_silu(ungated, 2, x.data(), 0.7f, n, out.data());
    write("convolve silu" + size, out);
    const int num_rows = 3; // of the state
    const std::vector<float> before = random.numbers(num_rows * n);
    std::vector<float> after(num_rows * n);
    const float b[] = {0.5f, -0.3f, 0.9f}, c[] = {-0.2f, 0.8f, 0.4f};
    kernels.update_ssm(
        {x.data(), b, c, 0.9f, 0.2f, 1.1f, before.data(), after.data(), out.data(), n, num_rows});
    write("ssm" + size, out);
    write("ssm state" + size, after);
}

// Three tokens of a head with `n` columns, behind a state and behind none.
void try_delta_rule(const Kernels &kernels, int n, Random &random) {
    const int key_dim = 13, num_tokens = 3;
    const std::vector<float> keys = random.numbers(num_tokens * key_dim);
    const std::vector<float> queries = random.numbers(num_tokens * key_dim);
    const std::vector<float> before = random.numbers(key_dim * n);
    const std::vector<float> decays = random.numbers(num_tokens * key_dim);
    const float betas[] = {0.3f, 0.8f, 0.5f};
    for (const bool begins : {false, true}) {
        std::vector<float> values = random.numbers(num_tokens * n), state(key_dim * n);
        DeltaHead head;
        head.queries = queries.data();
        head.keys = keys.data();
        head.betas = betas;
        head.decays = decays.data();
        head.values = values.data();
        head.key_stride = head.decay_stride = head.key_dim = key_dim;
        head.beta_stride = 1;
        head.value_stride = head.value_dim = n;
        head.by_row = begins;
        head.num_tokens = num_tokens;
        head.before = begins ? nullptr : before.data();
        head.state = state.data();
        kernels.delta_rule(head);
        values.insert(values.end(), state.begin(), state.end());
        write((begins ? "first delta rule " : "delta rule ") + std::to_string(n), values);
    }
}

void try_rows(const Kernels &kernels) {
    Random random(3);
    for (const int n : {1, 15, 16, 17, 64, 130}) {
        try_norms(kernels, n, random);
        try_delta_rule(kernels, n, random);
    }
    const int n = 160;
    std::vector<float> gates = random.numbers(n), ups = random.numbers(n);
    for (int i = 0; i < n; ++i) {
        gates[i] *= i < 140 ? 12.0f : 200.0f;
    }
    for (const Gate gate : {Gate::silu, Gate::gelu, Gate::gelu_tanh, Gate::relu2}) {
        std::vector<float> out = gates;
        kernels.gate(gate, out.data(), ups.data(), n);
        write("gate " + std::to_string(int(gate)), out);
        out = gates;
        kernels.activate(gate, out.data(), n);
        write("activate " + std::to_string(int(gate)), out);
    }
    std::vector<float> out = gates;
    kernels.xielu({0.8f, 1.1f, 0.5f, -1e-6f}, out.data(), n);
    write("xielu", out);
    out = gates;
    kernels.clamped_gate(7.0f, 1.702f, out.data(), ups.data(), n);
    write("clamped gate", out);
    out = gates;
    kernels.softcap(30.0f, out.data(), n);
    write("softcap", out);
    out[7] = out[100] = __builtin_nanf("");
    std::fill_n(out.begin() + 64, 10, __builtin_nanf(""));
    for (const int count : {1, 63, 64, 65, 160}) {
        std::vector<float> maxima(num_blocks_of(count));
        kernels.block_maxima(out.data(), count, maxima.data());
        write("maxima " + std::to_string(count), maxima);
    }
}

// Keys and values of one sequence in shuffled pages, and a tile of its last tokens.
struct Sequence {
    Sequence(const Kernels &kernels, Format format, int head_dim, int page_tokens, Random &random,
             bool has_latents = false)
        : format(format), head_dim(head_dim), page_tokens(page_tokens), has_latents(has_latents) {
        const int num_pages = (num_keys + page_tokens - 1) / page_tokens;
        kv.allocate(format, {{1, head_dim}}, num_pages + 1, page_tokens, has_latents);
        for (int i = 0; i < num_pages; ++i) {
            pages.push_back(num_pages - i);
        }
        for (int i = 0; i < num_keys; ++i) {
            const std::vector<float> key = random.numbers(head_dim),
                                     value = random.numbers(head_dim);
            const HeadPlace place = kv.place(0, 0, pages[i / page_tokens], i % page_tokens);
            kernels.store_head(place, key.data(), value.data()); // of a latent, the value alone
        }
    }

    AttentionTile tile(const float *queries, bool is_rounded, int first, int count, int group,
                       Window window, float softcap) const {
        return {
            queries,       is_rounded,        count,   group,           head_dim,    head_dim,
            first,         first + count - 1, nullptr, window,          softcap,     format,
            kv.keys(0, 0), kv.values(0, 0),   nullptr, kv.page_bytes(), page_tokens, pages.data()};
    }

    static constexpr int num_keys = 300;
    const Format format;
    const int head_dim, page_tokens;
    const bool has_latents;
    KvPages kv;
    std::vector<int32_t> pages;
};

// [rows, maximum and sum and values] of a segment.
std::vector<float> attend(const Kernels &kernels, const AttentionTile &tile, int segment) {
    const int rows = tile.rows(), width = padded(tile.head_dim);
    std::vector<float> scores(size_t(rows) * segment_tokens), values(size_t(rows) * width);
    std::vector<float> maximum(rows), sum(rows), found;
    const bool has_latents = tile.keys == tile.values;
    const auto attend_segment =
        has_latents ? kernels.attend_latent_segment : kernels.attend_segment;
    attend_segment(tile, segment, scores.data(),
                   {maximum.data(), sum.data(), values.data(), width});
    for (int row = 0; row < rows; ++row) {
        const float *own = values.data() + size_t(row) * width;
        found.insert(found.end(), {maximum[row], sum[row]});
        found.insert(found.end(), own, own + tile.head_dim);
    }
    return found;
}

void try_attention(const Kernels &kernels, const Sequence &sequence, bool is_rounded, int group,
                   Window window, float softcap, const std::string &name, Random &random) {
    const int count = 48 / group, dim = sequence.head_dim, first = sequence.num_keys - count;
    std::vector<float> queries = random.numbers(size_t(count) * group * dim);
    for (size_t i = 0; is_rounded && i < queries.size(); i += dim) {
        kernels.round_row(&queries[i], dim, &queries[i]); // floats, if nothing else is rounded
    }
    const bool rounds = is_rounded && kernels.rounds_attention;
    for (int segment = 0; segment < 2; ++segment) {
        const std::string part = name + " segment " + std::to_string(segment);
        const auto whole = attend(
            kernels, sequence.tile(queries.data(), rounds, first, count, group, window, softcap),
            segment);
        write(part, whole);
        for (const int token : {0, 3, count - 1}) {
            const float *own = queries.data() + size_t(token) * group * dim;
            const auto alone = attend(
                kernels, sequence.tile(own, rounds, first + token, 1, group, window, softcap),
                segment);
            check(std::equal(alone.begin(), alone.end(),
                             whole.begin() + size_t(token) * group * (dim + 2)),
                  part + ": token " + std::to_string(token));
        }
    }
}

void try_attention(const Kernels &kernels) {
    Random random(4);
    const Window all{INT32_MAX, 0}, some{50, 0};
    for (const Format format : {Format::f32, Format::bf16}) {
        for (const int dim : {10, 64, 80}) {
            const Sequence sequence(kernels, format, dim, dim == 64 ? 32 : 16, random);
            const std::string kind =
                (format == Format::f32 ? "f32 " : "bf16 ") + std::to_string(dim);
            for (const int group : {1, 3}) {
                const std::string name = kind + " group " + std::to_string(group);
                try_attention(kernels, sequence, false, group, all, 0.0f, "attention " + name,
                              random);
                try_attention(kernels, sequence, false, group, some, 2.0f, "capped " + name,
                              random);
                if (dim % lanes == 0) {
                    const Sequence latents(kernels, format, dim, sequence.page_tokens, random,
                                           true);
                    try_attention(kernels, latents, false, group, all, 0.0f, "latents " + name,
                                  random);
                }
                if (format == Format::bf16) {
                    try_attention(kernels, sequence, true, group, all, 0.0f,
                                  "rounded attention " + name, random);
                }
            }
        }
    }
}

// A layer of two KV heads of 64, which sees a window.
constexpr LayerConfig attention_layer(Window window, int intermediate_size) {
    LayerConfig layer{};
    layer.window = window;
    layer.mixer = Mixer::attention;
    layer.has_mlp = 1;
    layer.mixer_multiplier = layer.attention_multiplier = 1.0f;
    layer.num_kv_heads = 2;
    layer.head_dim = 64;
    layer.intermediate_size = intermediate_size;
    layer.kv_layer = -1;
    return layer;
}

// A decoder of two layers, and steps of three sequences.
class Decoder {
public:
    Decoder(Isa isa, Format format, Format kv_format, int activation_bits)
        : model_(config(isa, kv_format, activation_bits), layers, &rope) {
        Random random(5);
        fill(model_.embed, Format::f32, vocab, hidden, random);
        fill(model_.head, format, vocab, hidden, random);
        model_.norm = random.numbers(hidden);
        for (Layer &layer : model_.layers) {
            for (const int slot : {slot_q, slot_o, slot_gate, slot_up, slot_down}) {
                fill(layer.matrices[slot], format, hidden, hidden, random);
            }
            fill(layer.matrices[slot_k], format, hidden / 2, hidden, random);
            fill(layer.matrices[slot_v], format, hidden / 2, hidden, random);
            layer.vectors[slot_attn_norm] = random.numbers(hidden);
            layer.vectors[slot_mlp_norm] = random.numbers(hidden);
        }
    }

    // Logits of tokens [begin, end) of some sequences, as rows.
    struct Part {
        int sequence, begin, end;
    };
    std::vector<float> run(const std::vector<Part> &parts) {
        std::vector<int32_t> ids, positions, sequences, rows;
        for (const Part &part : parts) {
            for (int i = part.begin; i < part.end; ++i) {
                ids.push_back((i * 37 + part.sequence * 11) % vocab);
                positions.push_back(i);
                sequences.push_back(part.sequence);
                rows.push_back(int32_t(rows.size()));
            }
        }
        std::vector<int32_t> table;
        for (int i = 0; i < 3 * max_pages; ++i) {
            table.push_back(i % 3 * max_pages + i / 3);
        }
        const int count = int(ids.size()), stride = stride_of(vocab);
        std::vector<float> logits(size_t(count) * stride), maxima(count * num_blocks_of(vocab));
        Step step{};
        step.token_ids = ids.data();
        step.positions = positions.data();
        step.sequences = sequences.data();
        step.page_table = table.data();
        step.logit_rows = rows.data();
        step.logits = logits.data();
        step.maxima = maxima.data();
        step.num_tokens = step.num_logit_rows = count;
        step.num_sequences = 3;
        step.max_pages = max_pages;
        if (!is_valid(model_, step)) {
            std::abort();
        }
        run_step(model_, step);
        std::vector<float> found;
        for (int row = 0; row < count; ++row) {
            found.insert(found.end(), &logits[row * stride], &logits[row * stride + vocab]);
        }
        return found;
    }

private:
    static constexpr int hidden = 256, vocab = 112, max_pages = 2;
    static constexpr LayerConfig layers[2] = {attention_layer({INT32_MAX, 0}, hidden),
                                              attention_layer({9, 0}, hidden)};
    static constexpr float inv_freq[32] = {1.0f, 0.7f, 0.5f, 0.3f, 0.2f, 0.1f, 0.05f, 0.01f};
    static constexpr int32_t axes[32] = {};
    static constexpr RopeConfig rope = {inv_freq, axes, 32, 0, 1.0f};

    static Config config(Isa isa, Format kv_format, int activation_bits) {
        Config config{};
        config.vocab_size = vocab;
        config.hidden_size = hidden;
        config.gated_mlp = 1;
        config.gate_multiplier = config.mlp_multiplier = 1.0f;
        config.num_heads = 4;
        config.num_layers = 2;
        config.gated_mlp = 1;
        config.num_ropes = 1;
        config.num_pages = 3 * max_pages;
        config.page_tokens = 16;
        config.kv_format = kv_format;
        config.num_threads = 2;
        config.isa = isa;
        config.rounds_activations = kv_format == Format::bf16;
        config.activation_bits = activation_bits;
        config.norm_eps = 1e-5f;
        config.attention_scale = 0.125f;
        config.embedding_multiplier = config.residual_multiplier = config.logit_multiplier = 1.0f;
        return config;
    }

    Model model_;
};

void try_steps(Isa isa) {
    const struct {
        const char *name;
        Format format, kv_format;
        int activation_bits;
    } kinds[] = {{"f32", Format::f32, Format::f32, 0},
                 {"rounded bf16", Format::bf16, Format::bf16, 0},
                 {"rounded q4_k", Format::q4_k, Format::bf16, 16},
                 {"q6_k", Format::q6_k, Format::f32, 16},
                 {"int8", Format::int8, Format::f32, 8}};
    for (const auto &kind : kinds) {
        const std::string name = std::string("step ") + kind.name;
        Decoder decoder(isa, kind.format, kind.kv_format, kind.activation_bits);
        const std::vector<float> whole = decoder.run({{0, 0, 24}});
        write(name, whole);
        std::vector<float> parts = decoder.run({{0, 0, 1}});
        for (const auto &[begin, end] : {std::pair{1, 4}, {4, 13}, {13, 24}}) {
            const auto next = decoder.run({{0, begin, end}});
            parts.insert(parts.end(), next.begin(), next.end());
        }
        check(parts == whole, name + ": one sequence in parts");
        decoder.run({{2, 0, 3}, {0, 0, 23}, {1, 0, 5}});
        const auto last = decoder.run({{1, 5, 6}, {0, 23, 24}, {2, 3, 6}});
        const size_t width = whole.size() / 24;
        check(std::equal(whole.end() - width, whole.end(), last.begin() + width),
              name + ": among others");
    }
}

void try_sampler(Isa isa) {
    Random random(6);
    const SamplerKernels &kernels = *find_sampler_kernels(isa);
    const int n = 1000;
    std::vector<float> logits = random.numbers(n), masked(n);
    for (float &x : logits) {
        x *= 15.0f;
    }
    const Softmax softmax{1.25, 1.25 * 14.9, -20.0};
    std::vector<double> weights(n);
    kernels.weigh(logits.data(), n, softmax, weights.data());
    write("exact weights", weights);
    write("exact sum", std::vector<double>{kernels.sum_weights(logits.data(), n, softmax)});
    std::vector<uint32_t> bits;
    for (int i = 0; i < n; i += mask_tokens) {
        bits.push_back(uint32_t(random.next()));
    }
    kernels.mask(logits.data(), bits.data(), n, masked.data());
    write("exact mask", masked);
}

void try_rank_sums(Isa isa) {
    Random random(7);
    const RankSums &sums = *find_rank_sums(isa);
    const size_t n = 203;
    std::vector<std::vector<uint32_t>> terms(3, std::vector<uint32_t>(n));
    for (auto &term : terms) {
        for (uint32_t &x : term) {
            x = uint32_t(random.next());
        }
    }
    const void *const places[] = {terms[0].data(), terms[1].data(), terms[2].data()};
    for (const Number number : {Number::fp32, Number::fp16, Number::bf16}) {
        std::vector<uint8_t> out(n * bytes_of(number));
        sums.add(number, places, 3, n, out.data());
        write("exact rank sums " + std::to_string(int(number)), out);
    }
}

} // namespace

int main(int, char **arguments) {
#if defined(__x86_64__)
    const std::string name = arguments[1];
    if (name == "avx2" || name == "avx2 with vnni") {
        const Kernels &kernels = name == "avx2" ? avx2_kernels : avx_vnni_kernels();
        try_products(kernels);
        try_quantizing(kernels);
        return num_wrong ? 1 : 0;
    }
#endif
    const auto isa = Isa(std::atoi(arguments[1]));
    const Kernels *kernels = find_kernels(isa);
    if (!kernels) {
        return 2;
    }
    std::fprintf(stderr, "%s\n", best_kernels());
    try_products(*kernels);
    try_quantizing(*kernels);
    try_rows(*kernels);
    try_attention(*kernels);
    try_steps(isa);
    try_sampler(isa);
    try_rank_sums(isa);
    return num_wrong ? 1 : 0;
}
