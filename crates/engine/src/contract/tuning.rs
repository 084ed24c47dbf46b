//! The values by which an engine is tuned, as facts of plans.

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TuningOrigin {
    /// Measured on this device when it was opened, or computed from what was measured.
    Measured,
    /// From published measurements of other machines: this device was not measured.
    Literature,
    /// The device or the driver reports it.
    Reported,
}

impl TuningOrigin {
    /// The word for display.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Literature => "literature",
            Self::Reported => "reported",
        }
    }
}

/// A value by which an engine is tuned, and the reason.
///
/// ```
/// use std::sync::Arc;
///
/// use memferry::Ferry;
/// use memferry::engine::dsa::DsaEngine;
/// use memferry::engine::testing::dsa_model::DsaModel;
/// use memferry::plan::TuningFact;
///
/// let engine = Arc::new(DsaEngine::over_model(DsaModel::new())?);
/// let ferry = Ferry::builder().engine(engine, 1).build()?;
/// let facts: &[TuningFact] = &ferry.plan_context().engines[0].tuning;
/// for fact in facts {
///     println!("{} = {} ({}): {}", fact.name, fact.text, fact.origin.name(), fact.reason);
/// }
/// # assert!(facts.iter().any(|fact| fact.name == "descriptor_ns"));
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct TuningFact {
    /// The name, with the unit last.
    pub name: &'static str,
    /// The value.
    pub value: f64,
    /// The value as people write it.
    pub text: String,
    /// Where the value comes from.
    pub origin: TuningOrigin,
    /// What it decides, and why.
    pub reason: &'static str,
}

/// The kernel of groups of small copies that a thread uses now, and the measured speeds of both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupKernel {
    /// Whether groups use non-temporal stores.
    pub streams: bool,
    /// The speed with ordinary stores in GB/s; 0 before it was measured.
    pub cached_gb_per_s: f64,
    /// The speed with non-temporal stores in GB/s; that of the profile before it was measured.
    pub streaming_gb_per_s: f64,
}

/// The kernels of groups of small copies in one channel. Each kind of thread has other data in its
/// caches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupKernels {
    /// Of the channel's own thread.
    pub worker: GroupKernel,
    /// Of threads that wait for the channel and help it.
    pub helper: GroupKernel,
}
