#include "cpu/short_conv.h"
#include "cpu/causal_conv.h"
#include "cpu/products.h"

namespace headrace {

namespace {

CausalConv conv_of(const StepState &s, const Layer &layer) {
    const ShortConvConfig &config = layer.config.short_conv;
    const std::vector<float> &bias = layer.vectors[slot_conv_bias];
    CausalConv conv{layer.vectors[slot_conv].data(),
                    s.conv_x,
                    s.conv_stride,
                    config.channels,
                    config.kernel_size,
                    layer.state_offset,
                    bias.empty() ? nullptr : bias.data()};
    conv.gate = s.conv_b;
    return conv;
}

} // namespace

void run_short_conv(StepState &s, const Layer &layer) {
    StepClock &clock = s.model.pool.clock;
    const Matrix &out = layer.matrices[slot_out];
    const auto product = [&](MatrixSlot matrix, VectorSlot bias, float *to) {
        return Product{{layer.matrices[matrix], s.normed, &layer.vectors[bias]}, to, s.conv_stride};
    };
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens,
             {product(slot_in_b, slot_in_b_bias, s.conv_b),
              product(slot_in_c, slot_in_c_bias, s.convolved.rows),
              product(slot_in_x, slot_in_x_bias, s.conv_x)});
    clock.enter(StepPart::rows);
    const CausalConv conv = conv_of(s, layer);
    s.each_row([&](int token) { // c *= conv(b * x)
        ConvTap taps[max_conv_kernel];
        const int num_taps = conv.taps_of(s, token, taps);
        s.model.kernels->convolve(taps, num_taps, conv.bias, conv.channels, s.convolved.row(token));
        if (CausalConv::ends_state(s.step, token)) {
            conv.write_state(s, token);
        }
        round_activations(s, s.convolved, {&out}, token);
    });
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens,
             {{{out, s.convolved, &layer.vectors[slot_out_bias]}, s.sublayer, s.hidden_stride}});
}

} // namespace headrace
