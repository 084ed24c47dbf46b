//! An engine that stalls until a gate is opened, and records how many descriptors it had received
//! each time memory was pinned.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use memferry_engine::contract::{Capabilities, CopyDirection, Pinner};
use memferry_engine::testing::polled::{AuditingPinner, PolledEngine};
use memferry_engine::{
    Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine, ExecutionError,
    OpenError, Sequence, SubmitError, Submitted,
};
use memferry_memory::pinning::{Access, PageRange, PinError, PinToken};

/// Around a polled engine with pinned memory.
#[derive(Debug)]
pub(crate) struct GatedEngine {
    inner: PolledEngine,
    gate: Arc<AtomicBool>,
    pinner: Arc<NotingPinner>,
}

impl GatedEngine {
    pub(crate) fn new(ledger: Arc<AuditingPinner>, open: bool) -> Self {
        let inner = PolledEngine::pinned_by(ledger.clone());
        let (channel, submitted) = (Mutex::new(None), Mutex::default());
        let pinner = Arc::new(NotingPinner { ledger, channel, submitted });
        Self { inner, gate: Arc::new(AtomicBool::new(open)), pinner }
    }

    pub(crate) fn open(&self) {
        self.gate.store(true, Ordering::Release);
    }

    /// The number of descriptors that the last channel had received at each call of the pinner.
    pub(crate) fn submitted_at_pins(&self) -> Vec<u64> {
        self.pinner.submitted.lock().unwrap().clone()
    }
}

impl Engine for GatedEngine {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        self.inner.cost(direction)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(self.pinner.clone())
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let (inner, gate) = (self.inner.open_channel(options)?, self.gate.clone());
        let channel: Arc<dyn Channel> = Arc::new(GatedChannel { inner, gate });
        *self.pinner.channel.lock().unwrap() = Some(Arc::downgrade(&channel));
        Ok(channel)
    }
}

#[derive(Debug)]
struct NotingPinner {
    ledger: Arc<AuditingPinner>,
    channel: Mutex<Option<Weak<dyn Channel>>>,
    submitted: Mutex<Vec<u64>>,
}

impl Pinner for NotingPinner {
    fn name(&self) -> &'static str {
        "noting"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        let channel = self.channel.lock().unwrap().as_ref().and_then(Weak::upgrade);
        let submitted = channel.map(|channel| channel.statistics().submitted);
        self.submitted.lock().unwrap().extend(submitted);
        self.ledger.pin(range, access)
    }

    fn unpin(&self, range: PageRange, token: &PinToken) {
        self.ledger.unpin(range, token);
    }

    fn tracks_mapping(&self) -> bool {
        self.ledger.tracks_mapping()
    }
}

#[derive(Debug)]
struct GatedChannel {
    inner: Arc<dyn Channel>,
    gate: Arc<AtomicBool>,
}

// SAFETY: everything is the inner channel's, which is only stalled at times.
unsafe impl Channel for GatedChannel {
    fn submit(&self, batch: &mut [Option<Descriptor>]) -> Result<Submitted, SubmitError> {
        self.inner.submit(batch)
    }

    fn completed(&self) -> Sequence {
        self.inner.completed()
    }

    fn error_of(&self, sequence: Sequence) -> Option<ExecutionError> {
        self.inner.error_of(sequence)
    }

    fn poll(&self) -> bool {
        self.gate.load(Ordering::Acquire) && self.inner.poll()
    }

    fn close(&self) {
        self.inner.close();
    }

    fn outstanding_bytes(&self) -> u64 {
        self.inner.outstanding_bytes()
    }

    fn statistics(&self) -> ChannelStatistics {
        self.inner.statistics()
    }
}
