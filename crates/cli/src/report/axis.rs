//! The axes of a plot: the positions of sizes and values in the drawing, and the values that get a
//! label. The axes depend on figures, but not on SVG.

use memferry_bench::results::figure::Figure;

// The size of the drawing, in units that are pixels at its natural width.
pub(super) const WIDTH: f64 = 600.0;
pub(super) const HEIGHT: f64 = 320.0;
pub(super) const LEFT: f64 = 58.0;
pub(super) const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
pub(super) const BOTTOM: f64 = 30.0;

/// The x axis: sizes on a logarithmic scale to base 2.
#[derive(Debug)]
pub(super) struct XAxis {
    first: f64,
    last: f64,
}

impl XAxis {
    /// The axis for the sizes of a figure.
    pub(super) fn over(figure: &Figure<'_>) -> Self {
        let sized = || figure.sizes.iter().filter(|&&bytes| bytes > 0);
        let exponent = |bytes: Option<&u64>| bytes.map_or(0.0, |&bytes| (bytes as f64).log2());
        Self { first: exponent(sized().next()), last: exponent(sized().next_back()) }
    }

    /// The position of a size.
    pub(super) fn position(&self, bytes: u64) -> f64 {
        self.exponent_position((bytes.max(1) as f64).log2())
    }

    /// The position of a power of two.
    pub(super) fn exponent_position(&self, exponent: f64) -> f64 {
        // The inset keeps points at the edge from being clipped.
        const INSET: f64 = 10.0;
        let span = (self.last - self.first).max(f64::MIN_POSITIVE);
        let inner = WIDTH - LEFT - RIGHT - 2.0 * INSET;
        LEFT + INSET + (exponent - self.first) / span * inner
    }

    /// The exponents of the labels: evenly spaced, and no more than fit side by side.
    pub(super) fn ticks(&self) -> Vec<u32> {
        const MAX_LABELS: u32 = 9;
        let (first, last) = (self.first.ceil() as u32, self.last.floor() as u32);
        let octaves = last.saturating_sub(first) + 1;
        let step = octaves.div_ceil(MAX_LABELS).max(1).next_power_of_two();
        (first..=last).filter(|exponent| exponent.is_multiple_of(step)).collect()
    }
}

/// The y axis: linear from zero, or logarithmic to base 10 for times with a large range.
#[derive(Debug)]
pub(super) struct YAxis {
    low: f64,
    high: f64,
    /// Whether the scale is logarithmic.
    pub(super) is_log: bool,
    /// The values to label.
    pub(super) ticks: Vec<f64>,
}

impl YAxis {
    /// The axis for the values of a figure.
    pub(super) fn over(figure: &Figure<'_>) -> Self {
        const LOG_FROM: f64 = 30.0;
        let drawn: Vec<_> = figure.series.iter().flat_map(|s| figure.line(s)).collect();
        let finite = |value: &f64| value.is_finite();
        let highs = drawn.iter().flat_map(|row| [row.value, row.high]).filter(finite);
        let lows = drawn.iter().flat_map(|row| [row.value, row.low]).filter(finite);
        let (high, low) = (highs.fold(0.0, f64::max), lows.fold(f64::INFINITY, f64::min));
        if figure.unit == "ns" && low > 0.0 && high / low > LOG_FROM {
            Self::log(low, high)
        } else {
            Self::linear(high)
        }
    }

    fn linear(high: f64) -> Self {
        let high = if high > 0.0 { high } else { 1.0 };
        let step = nice_step(high / 5.0);
        let steps = (high * 0.999 / step).ceil() as u32;
        let ticks: Vec<_> = (0..=steps).map(|count| f64::from(count) * step).collect();
        Self { low: 0.0, high: f64::from(steps) * step, is_log: false, ticks }
    }

    fn log(low: f64, high: f64) -> Self {
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let ticks = (first..=last).map(|exponent| 10_f64.powi(exponent)).collect();
        Self { low: f64::from(first), high: f64::from(last), is_log: true, ticks }
    }

    /// The position of a value.
    pub(super) fn position(&self, value: f64) -> f64 {
        let value = if self.is_log { value.log10() } else { value };
        let share = (value - self.low) / (self.high - self.low);
        HEIGHT - BOTTOM - share.clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM)
    }
}

/// The smallest of 1, 2, 2.5, 5 or 10 times a power of ten that is at least `wish`.
fn nice_step(wish: f64) -> f64 {
    let power = 10_f64.powf(wish.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= wish * 0.999);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_an_axis_are_round() {
        for (wish, step) in
            [(0.19, 0.2), (1.0, 1.0), (2.1, 2.5), (3.0, 5.0), (7.0, 10.0), (42.0, 50.0)]
        {
            assert!((nice_step(wish) - step).abs() < 1e-9, "{wish}: {}", nice_step(wish));
        }
    }

    #[test]
    fn a_linear_axis_begins_at_zero_and_covers_the_highest_value() {
        let axis = YAxis::linear(28.4);
        assert_eq!(axis.ticks.first(), Some(&0.0));
        assert!(axis.high >= 28.4);
        assert!(axis.position(0.0) > axis.position(28.4));
    }

    #[test]
    fn the_sizes_of_many_octaves_get_few_labels() {
        let axis = XAxis { first: 6.0, last: 28.0 };
        assert_eq!(axis.ticks(), [8, 12, 16, 20, 24, 28]);
        assert_eq!(XAxis { first: 12.0, last: 14.0 }.ticks(), [12, 13, 14]);
    }

    #[test]
    fn a_log_axis_places_decades_evenly() {
        let axis = YAxis::log(12.0, 90_000.0);
        let steps: Vec<_> =
            axis.ticks.windows(2).map(|w| axis.position(w[0]) - axis.position(w[1])).collect();
        assert!(steps.iter().all(|step| (step - steps[0]).abs() < 1e-6));
    }
}
