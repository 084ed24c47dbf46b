//! Engines under test, test memory, and waits with a timeout.

use std::sync::Arc;
use std::time::Instant;

use memferry_engine::DeviceBuffer;
use memferry_engine::contract::{PinCacheLimits, RegistrationCache};
use memferry_engine::cuda::{CudaEngine, CudaProfile};
use memferry_engine::testing::conformance::CASE_TIMEOUT;
use memferry_engine::testing::cuda_model::{CudaFaults, CudaModel, CudaModelStats};
use memferry_engine::{
    Channel, ChannelOptions, Completion, Engine, ExecutionError, MemoryKind, TransferOutput,
};
use memferry_sys::Pages;

pub(crate) use crate::cuda::cuda_operation::{CudaOperation, MemoryAddress, device, host};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const UNTOUCHED: u8 = 0xC3;

/// The outcome of a successful copy.
pub(crate) const OK: Result<TransferOutput, ExecutionError> =
    Ok(TransferOutput { difference: None, crc: None });

/// Limits that no test exceeds.
pub(crate) const PLENTY: PinCacheLimits = PinCacheLimits { max_bytes: 1 << 30, max_entries: 1024 };

/// An engine with open channels. On drop, its model must have seen no copy of memory that was
/// unregistered in flight or not registered, and all device memory must be free.
pub(crate) struct CudaUnderTest {
    pub(crate) name: &'static str,
    pub(crate) engine: Arc<CudaEngine>,
    pub(crate) channels: Vec<Arc<dyn Channel>>,
    /// For tests that copy unregistered memory on purpose.
    pub(crate) allows_unregistered_copies: bool,
    model: Option<Arc<CudaModel>>,
}

/// The engine over models, as sole user and shared, and over the GPU of this machine if there is
/// one.
pub(crate) fn subjects() -> Vec<CudaUnderTest> {
    let gpu = gpu().map(|engine| CudaUnderTest::new("the GPU of this machine", engine, None));
    let models =
        [CudaUnderTest::modelled, CudaUnderTest::shared].map(|model| model(CudaFaults::default()));
    models.into_iter().chain(gpu).collect()
}

/// The engines that are sole users, and register the memory that they copy.
pub(crate) fn sole_subjects() -> impl Iterator<Item = CudaUnderTest> {
    subjects().into_iter().filter(|subject| subject.registrations().is_sole_user())
}

/// One engine for all tests: the registrations of one would block those of another.
#[cfg(feature = "cuda")]
fn gpu() -> Option<Arc<CudaEngine>> {
    static GPU: std::sync::OnceLock<Option<Arc<CudaEngine>>> = std::sync::OnceLock::new();
    let settings = memferry_engine::cuda::CudaConfig { is_sole_user: true, ..Default::default() };
    let open = || match CudaEngine::open(settings) {
        Ok(engine) => Some(Arc::new(engine)),
        Err(error) => {
            memferry_testing::skip(memferry_testing::Requirement::Gpu, error);
            None
        }
    };
    GPU.get_or_init(open).clone()
}

#[cfg(not(feature = "cuda"))]
fn gpu() -> Option<Arc<CudaEngine>> {
    None
}

impl CudaUnderTest {
    /// An engine over a model with faults.
    pub(crate) fn modelled(faults: CudaFaults) -> Self {
        Self::limited(faults, PLENTY)
    }

    /// The same, with other limits of the registration cache.
    pub(crate) fn limited(faults: CudaFaults, limits: PinCacheLimits) -> Self {
        let model = CudaModel::with_faults(faults);
        let engine = CudaEngine::with_driver(model.clone(), CudaProfile::default(), limits);
        let engine = engine.expect("an engine over a model").sole_user();
        Self::new("a model", Arc::new(engine), Some(model))
    }

    /// An engine over a model with other users.
    pub(crate) fn shared(faults: CudaFaults) -> Self {
        let model = CudaModel::with_faults(faults);
        let engine = CudaEngine::with_driver(model.clone(), CudaProfile::default(), PLENTY);
        Self::new("a shared model", Arc::new(engine.expect("an engine")), Some(model))
    }

    fn new(name: &'static str, engine: Arc<CudaEngine>, model: Option<Arc<CudaModel>>) -> Self {
        let (channels, may_stray) = (Vec::new(), false);
        let mut subject =
            Self { name, engine, channels, allows_unregistered_copies: may_stray, model };
        subject.open(&ChannelOptions::default());
        subject
    }

    /// Opens one more channel.
    pub(crate) fn open(&mut self, options: &ChannelOptions) {
        self.channels.push(self.engine.open_channel(options).expect("a channel"));
    }

    /// Opens more channels, up to `count`.
    pub(crate) fn with_channels(mut self, count: usize) -> Self {
        while self.channels.len() < count {
            self.open(&ChannelOptions::default());
        }
        self
    }

    pub(crate) fn is_model(&self) -> bool {
        self.model.is_some()
    }

    /// Whether memory stays registered after its use: not if the kernel does not report unmapped
    /// memory.
    pub(crate) fn caches_registrations(&self) -> bool {
        self.registrations().caches_by_default()
    }

    pub(crate) fn registrations(&self) -> &RegistrationCache {
        self.engine.registrations().expect("this engine registers memory")
    }

    pub(crate) fn model(&self) -> &CudaModel {
        self.model.as_deref().expect("a subject over a model")
    }

    pub(crate) fn stats(&self) -> CudaModelStats {
        self.model().stats()
    }

    /// Device memory, all of it [`UNTOUCHED`].
    pub(crate) fn device(&self, bytes: usize) -> DeviceBuffer {
        let memory = self.engine.allocate(bytes).expect("memory of the device");
        self.execute(CudaOperation::fill(device(&memory, 0), bytes, UNTOUCHED)).expect("a fill");
        memory
    }

    /// Device memory with these bytes.
    pub(crate) fn upload(&self, bytes: &[u8]) -> DeviceBuffer {
        let memory = self.engine.allocate(bytes.len()).expect("memory of the device");
        let source = MemoryAddress { address: bytes.as_ptr() as u64, kind: MemoryKind::Host };
        let job = CudaOperation::copy(source, device(&memory, 0), bytes.len()).transient(true);
        self.execute(job).expect("an upload");
        memory
    }

    /// The contents of device memory.
    pub(crate) fn download(&self, memory: &DeviceBuffer) -> Vec<u8> {
        let mut bytes = vec![!UNTOUCHED; memory.len()];
        let target = MemoryAddress { address: bytes.as_mut_ptr() as u64, kind: MemoryKind::Host };
        let job = CudaOperation::copy(device(memory, 0), target, memory.len()).transient(true);
        self.execute(job).expect("a download");
        bytes
    }

    /// Submits an operation to the first channel, or, if it is chunked, work offers to all
    /// channels.
    pub(crate) fn start(&self, job: CudaOperation) -> Arc<Completion> {
        let completion = Arc::new(job.completion());
        let invited = if job.is_cut() { self.channels.len() } else { 1 };
        for channel in &self.channels[..invited] {
            let mut batch = [Some(job.descriptor(&completion))];
            wait_until("space in a channel", || {
                channel.submit(&mut batch).expect("open").count == 1
            });
        }
        completion
    }

    pub(crate) fn execute(&self, job: CudaOperation) -> Result<TransferOutput, ExecutionError> {
        outcome(&self.start(job))
    }
}

impl Drop for CudaUnderTest {
    fn drop(&mut self) {
        self.channels.clear();
        if let Some(model) = self.model.as_ref().filter(|_| !std::thread::panicking()) {
            let seen = model.stats();
            assert_eq!(
                seen.unregistered_in_flight, 0,
                "memory is unregistered only when no copy uses it"
            );
            assert!(
                self.allows_unregistered_copies || seen.outside_registration == 0,
                "only registered memory is copied"
            );
            assert_eq!(seen.device_bytes, 0, "all device memory is freed");
        }
    }
}

#[track_caller]
pub(crate) fn wait_until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + CASE_TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "timeout waiting for {what}");
        std::thread::yield_now();
    }
}

#[track_caller]
pub(crate) fn outcome(completion: &Completion) -> Result<TransferOutput, ExecutionError> {
    // Sleeps: spinning takes the processor from the threads that copy.
    assert!(
        completion.wait(0, Some(Instant::now() + CASE_TIMEOUT)),
        "timeout waiting for a transfer"
    );
    completion.outcome().expect("a complete transfer")
}

/// A pattern of which no two ranges are likely to be equal.
pub(crate) fn pattern(seed: u32, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    draw(seed, &mut bytes);
    bytes
}

/// Writes a pattern.
fn draw(seed: u32, bytes: &mut [u8]) {
    let byte = |at: u32| ((at ^ (seed << 16)).wrapping_mul(0x9E37_79B1) >> 24) as u8;
    bytes.iter_mut().enumerate().for_each(|(at, target)| *target = byte(at as u32));
}

/// Host memory with a pattern.
pub(crate) fn patterned(seed: u32, length: usize) -> Pages {
    let mut pages = Pages::new(length).expect("memory for a test");
    draw(seed, pages.as_mut_slice());
    pages
}

/// Host memory that is resident and [`UNTOUCHED`].
pub(crate) fn untouched(length: usize) -> Pages {
    let mut pages = Pages::new(length).expect("memory for a test");
    pages.as_mut_slice().fill(UNTOUCHED);
    pages
}

/// Checks that all of `found` is untouched, except `expected` at an offset.
#[track_caller]
pub(crate) fn check(found: &[u8], at: usize, expected: &[u8], what: &str) {
    let (end, is_untouched) = (at + expected.len(), |&byte: &u8| byte == UNTOUCHED);
    if found[at..end] != *expected {
        let wrong = (0..expected.len()).find(|&index| found[at + index] != expected[index]);
        panic!("{what}: the first wrong byte of {} is at {wrong:?}", expected.len());
    }
    let spilled = found[..at].iter().chain(&found[end..]).position(|byte| !is_untouched(byte));
    assert_eq!(spilled, None, "{what}: a byte outside the {} was written", expected.len());
}
