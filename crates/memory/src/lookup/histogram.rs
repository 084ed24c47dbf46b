//! A histogram with power-of-two buckets.

/// Counts values in one bucket for each power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Histogram {
    /// `counts[n]` is the number of values with n binary digits.
    counts: [u64; 65],
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; 65], max: 0 }
    }
}

impl Histogram {
    /// Counts a value.
    pub fn record(&mut self, value: u64) {
        self.counts[digits(value)] += 1;
        self.max = self.max.max(value);
    }

    /// The number of counted values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The median, rounded up to the end of its bucket.
    pub fn median(&self) -> u64 {
        self.percentile(50)
    }

    /// The 90th percentile, rounded up to the end of its bucket.
    pub fn percentile_90(&self) -> u64 {
        self.percentile(90)
    }

    /// The exact maximum.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The non-empty buckets: largest possible value and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let counted = self.counts.into_iter().enumerate().filter(|&(_, count)| count > 0);
        counted.map(|(digits, count)| (bucket_max(digits), count))
    }

    /// The end of the bucket of a percentile, at most the maximum; 0 if the histogram is empty.
    fn percentile(&self, percent: u64) -> u64 {
        let wanted = u128::from(self.count()) * u128::from(percent);
        let mut seen = 0u128;
        for (step, count) in self.buckets() {
            seen += u128::from(count) * 100;
            if seen >= wanted {
                return step.min(self.max);
            }
        }
        0
    }
}

fn digits(value: u64) -> usize {
    (u64::BITS - value.leading_zeros()) as usize
}

fn bucket_max(digits: usize) -> u64 {
    u64::MAX.checked_shr(u64::BITS - digits as u32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_histogram_says_zero() {
        let empty = Histogram::default();
        assert_eq!(
            (empty.count(), empty.median(), empty.percentile_90(), empty.max()),
            (0, 0, 0, 0)
        );
    }

    #[test]
    fn quantiles_are_the_ends_of_their_steps() {
        let mut histogram = Histogram::default();
        for value in [0, 1, 5, 6, 7, 100, 100, 100, 100, 1000] {
            histogram.record(value);
        }
        assert_eq!(histogram.count(), 10);
        assert_eq!(histogram.median(), 7);
        assert_eq!(histogram.percentile_90(), 127);
        assert_eq!(histogram.max(), 1000);
        let steps: Vec<_> = histogram.buckets().collect();
        assert_eq!(steps, [(0, 1), (1, 1), (7, 3), (127, 4), (1023, 1)]);
    }

    #[test]
    fn the_largest_value_fits() {
        let mut histogram = Histogram::default();
        histogram.record(u64::MAX);
        assert_eq!((histogram.median(), histogram.max()), (u64::MAX, u64::MAX));
    }
}
