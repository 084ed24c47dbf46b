//! Selection of the GPU of a ferry.

/// Selects the GPU that a ferry uses as a copy engine.
///
/// ```no_run
/// use memferry::{Ferry, Gpu};
///
/// let ferry = Ferry::builder().gpu(Gpu::IfPresent).build()?;
/// println!("{:?}", ferry.gpu());
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gpu {
    /// No GPU is used, and its driver is not loaded.
    #[default]
    Off,
    /// The first GPU is used, if one is available.
    IfPresent,
    /// The GPU with this ordinal is used; building the ferry fails without it.
    Number(usize),
}

impl Gpu {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        match name {
            "off" => Some(Self::Off),
            "auto" => Some(Self::IfPresent),
            number => number.parse().ok().map(Self::Number),
        }
    }
}
