// exp, tanh and the gates of the MLP over sixteen lanes.
#pragma once

namespace headrace {

// Relative error below 2e-7 (Cephes' polynomial). Below -87 the result is 0: exp(-inf) must be.
template <class V> typename V::Floats exp_of(typename V::Floats x) {
    using Floats = typename V::Floats;
    const Floats clamped = V::min(V::max(x, V::set(-87.0f)), V::set(88.0f));
    const Floats n = V::round(V::mul(clamped, V::set(1.44269504f)));
    Floats r = V::fma(n, V::set(-0.693359375f), clamped); // ln 2 in two parts
    r = V::fma(n, V::set(2.12194440e-4f), r);
    Floats p = V::set(1.9875691500e-4f);
    p = V::fma(p, r, V::set(1.3981999507e-3f));
    p = V::fma(p, r, V::set(8.3334519073e-3f));
    p = V::fma(p, r, V::set(4.1665795894e-2f));
    p = V::fma(p, r, V::set(1.6666665459e-1f));
    p = V::fma(p, r, V::set(0.5f));
    p = V::fma(p, V::mul(r, r), V::add(r, V::set(1.0f)));
    return V::zero_below(x, -87.0f, V::times_power_of_two(p, n));
}

template <class V> typename V::Floats tanh_of(typename V::Floats x) {
    const auto one = V::set(1.0f);
    const auto e = exp_of<V>(V::add(x, x));
    return V::sub(one, V::div(V::set(2.0f), V::add(e, one)));
}

template <class V> typename V::Floats silu(typename V::Floats x) {
    const auto e = exp_of<V>(V::sub(V::set(0.0f), x));
    return V::div(x, V::add(V::set(1.0f), e));
}

template <class V> typename V::Floats gelu_tanh(typename V::Floats x) {
    const auto cube = V::mul(V::mul(x, x), x);
    const auto inner = V::fma(V::set(0.044715f), cube, x);
    const auto t = tanh_of<V>(V::mul(V::set(0.7978845608f), inner));
    return V::mul(V::mul(V::set(0.5f), x), V::add(V::set(1.0f), t));
}

// erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
template <class V> typename V::Floats gelu(typename V::Floats x) {
    const auto one = V::set(1.0f), zero = V::set(0.0f);
    const auto z = V::mul(x, V::set(0.7071067812f));
    const auto size = V::max(z, V::sub(zero, z));
    const auto t = V::inverse(V::fma(V::set(0.3275911f), size, one));
    auto p = V::set(1.061405429f);
    p = V::fma(p, t, V::set(-1.453152027f));
    p = V::fma(p, t, V::set(1.421413741f));
    p = V::fma(p, t, V::set(-0.284496736f));
    p = V::fma(p, t, V::set(0.254829592f));
    // exp(-z * z) as a power of two, by its series. The exponent is never above 0.
    const auto y = V::max(V::mul(V::mul(z, z), V::set(-1.44269504f)), V::set(-126.0f));
    const auto n = V::round(y), r = V::sub(y, n);
    auto e = V::set(1.54035304e-4f);
    e = V::fma(e, r, V::set(1.33335581e-3f));
    e = V::fma(e, r, V::set(9.61812911e-3f));
    e = V::fma(e, r, V::set(5.55041087e-2f));
    e = V::fma(e, r, V::set(0.240226507f));
    e = V::fma(e, r, V::set(0.693147181f));
    e = V::times_power_of_two(V::fma(e, r, one), n);
    const auto tail = V::mul(V::mul(p, t), e); // 1 - erf|z|
    // x * (1 + erf z) / 2 is x - |x| * tail / 2 for positive x, else -|x| * tail / 2.
    return V::fma(V::mul(size, V::set(-0.7071067812f)), tail, V::max(x, zero));
}

template <class V> typename V::Floats relu2(typename V::Floats x) {
    const auto positive = V::max(x, V::set(0.0f));
    return V::mul(positive, positive);
}

// Apertus' activation, with numbers of its layer. It is alpha_p x^2 + beta x above 0. Below, it is
// alpha_n (e^min(x, eps) - 1 - x) + beta x.
struct Xielu {
    float alpha_p, alpha_n, beta, eps;
};

template <class V> typename V::Floats xielu_of(const Xielu &of, typename V::Floats x) {
    const auto zero = V::set(0.0f), positive = V::max(x, zero);
    const auto shrunk = V::sub(exp_of<V>(V::min(x, V::set(of.eps))), V::set(1.0f));
    const auto below = V::mul(V::set(of.alpha_n), V::sub(shrunk, x));
    const auto above = V::mul(V::mul(V::set(of.alpha_p), positive), positive);
    const auto curve = V::add(above, V::zero_below(V::sub(zero, x), 0.0f, below));
    return V::fma(V::set(of.beta), x, curve);
}

} // namespace headrace
