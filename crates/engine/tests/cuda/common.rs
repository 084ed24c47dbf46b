//! Engines to test, memory to copy between, and waits that end.

use std::sync::Arc;
use std::time::Instant;

use memferry_engine::conformance::LIMIT;
use memferry_engine::contract::{Limits, Registry};
use memferry_engine::cuda::model::{Faults, ModelDevice, Sightings};
use memferry_engine::cuda::{CudaEngine, DeviceMemory, Rates};
use memferry_engine::{
    Channel, ChannelOptions, Completion, Engine, ExecutionError, Finish, MemoryKind,
};
use memferry_sys::Pages;

pub(crate) use crate::job::{Job, Place, device, host};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const UNTOUCHED: u8 = 0xC3;

/// How a copy ends that ends well.
pub(crate) const OK: Result<Finish, ExecutionError> = Ok(Finish { difference: None });

/// More than any test uses.
pub(crate) const PLENTY: Limits = Limits { most_bytes: 1 << 30, most_entries: 1024 };

/// An engine with open channels. When it goes, its model must have seen no copy that was torn or
/// went astray, and must have all its memory back.
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    pub(crate) engine: Arc<CudaEngine>,
    pub(crate) channels: Vec<Arc<dyn Channel>>,
    /// For tests that lead copies astray on purpose.
    pub(crate) may_stray: bool,
    model: Option<Arc<ModelDevice>>,
}

/// The engine over models, alone and shared, and over the GPU of this machine if there is one.
pub(crate) fn subjects() -> Vec<Subject> {
    let gpu = gpu().map(|engine| Subject::new("the GPU of this machine", engine, None));
    let models = [Subject::modelled, Subject::shared].map(|model| model(Faults::default()));
    models.into_iter().chain(gpu).collect()
}

/// Those whose engines nobody else uses, so that they register what is copied.
pub(crate) fn sole_subjects() -> impl Iterator<Item = Subject> {
    subjects().into_iter().filter(|subject| subject.registry().is_sole_user())
}

/// One engine for all tests: registrations of one would be in the way of another's.
#[cfg(feature = "cuda")]
fn gpu() -> Option<Arc<CudaEngine>> {
    static GPU: std::sync::OnceLock<Option<Arc<CudaEngine>>> = std::sync::OnceLock::new();
    let settings = memferry_engine::cuda::Settings { is_sole_user: true, ..Default::default() };
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

impl Subject {
    /// An engine over a model that misbehaves.
    pub(crate) fn modelled(faults: Faults) -> Self {
        Self::limited(faults, PLENTY)
    }

    /// The same, with other limits on what stays registered.
    pub(crate) fn limited(faults: Faults, limits: Limits) -> Self {
        let model = ModelDevice::with_faults(faults);
        let engine = CudaEngine::with_driver(model.clone(), Rates::default(), limits);
        let engine = engine.expect("an engine over a model").sole_user();
        Self::new("a model", Arc::new(engine), Some(model))
    }

    /// An engine over a model that others use too.
    pub(crate) fn shared(faults: Faults) -> Self {
        let model = ModelDevice::with_faults(faults);
        let engine = CudaEngine::with_driver(model.clone(), Rates::default(), PLENTY);
        Self::new("a shared model", Arc::new(engine.expect("an engine")), Some(model))
    }

    fn new(name: &'static str, engine: Arc<CudaEngine>, model: Option<Arc<ModelDevice>>) -> Self {
        let (channels, may_stray) = (Vec::new(), false);
        let mut subject = Self { name, engine, channels, may_stray, model };
        subject.open(&ChannelOptions::default());
        subject
    }

    /// Opens one more channel.
    pub(crate) fn open(&mut self, options: &ChannelOptions) {
        self.channels.push(self.engine.open_channel(options).expect("a channel"));
    }

    /// The same with so many channels.
    pub(crate) fn with_channels(mut self, count: usize) -> Self {
        while self.channels.len() < count {
            self.open(&ChannelOptions::default());
        }
        self
    }

    pub(crate) fn is_model(&self) -> bool {
        self.model.is_some()
    }

    /// Whether memory stays registered after its use: not where the kernel does not tell what is
    /// unmapped.
    pub(crate) fn keeps(&self) -> bool {
        self.registry().keeps_anything()
    }

    pub(crate) fn registry(&self) -> &Registry {
        self.engine.registry().expect("this engine registers memory")
    }

    pub(crate) fn model(&self) -> &ModelDevice {
        self.model.as_deref().expect("a subject over a model")
    }

    pub(crate) fn sightings(&self) -> Sightings {
        self.model().sightings()
    }

    /// Memory of the device, all of it [`UNTOUCHED`].
    pub(crate) fn device(&self, bytes: usize) -> DeviceMemory {
        let memory = self.engine.allocate(bytes).expect("memory of the device");
        self.carry_out(Job::fill(device(&memory, 0), bytes, UNTOUCHED)).expect("a fill");
        memory
    }

    /// Memory of the device that holds these bytes.
    pub(crate) fn upload(&self, bytes: &[u8]) -> DeviceMemory {
        let memory = self.engine.allocate(bytes.len()).expect("memory of the device");
        let source = Place { address: bytes.as_ptr() as u64, kind: MemoryKind::Host };
        let job = Job::copy(source, device(&memory, 0), bytes.len()).passing(true);
        self.carry_out(job).expect("an upload");
        memory
    }

    /// What memory of the device holds.
    pub(crate) fn download(&self, memory: &DeviceMemory) -> Vec<u8> {
        let mut bytes = vec![!UNTOUCHED; memory.len()];
        let target = Place { address: bytes.as_mut_ptr() as u64, kind: MemoryKind::Host };
        let job = Job::copy(device(memory, 0), target, memory.len()).passing(true);
        self.carry_out(job).expect("a download");
        bytes
    }

    /// Hands a job to the first channel, or, if it is cut, invites all channels to it.
    pub(crate) fn begin(&self, job: Job) -> Arc<Completion> {
        let completion = Arc::new(job.completion());
        let invited = if job.is_cut() { self.channels.len() } else { 1 };
        for channel in &self.channels[..invited] {
            let mut batch = [Some(job.descriptor(&completion))];
            until("room in a channel", || channel.submit(&mut batch).expect("open").count == 1);
        }
        completion
    }

    pub(crate) fn carry_out(&self, job: Job) -> Result<Finish, ExecutionError> {
        outcome(&self.begin(job))
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.channels.clear();
        if let Some(model) = self.model.as_ref().filter(|_| !std::thread::panicking()) {
            let seen = model.sightings();
            assert_eq!(seen.torn_copies, 0, "memory is unregistered when nobody copies it");
            assert!(self.may_stray || seen.stray_copies == 0, "only registered memory is copied");
            assert_eq!(seen.device_bytes, 0, "all memory of the device is given back");
        }
    }
}

#[track_caller]
pub(crate) fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < deadline, "gave up waiting for {what}");
        std::thread::yield_now();
    }
}

#[track_caller]
pub(crate) fn outcome(completion: &Completion) -> Result<Finish, ExecutionError> {
    // It sleeps: spinning takes the processor from the threads that copy.
    assert!(completion.wait(0, Some(Instant::now() + LIMIT)), "gave up waiting for a transfer");
    completion.outcome().expect("a transfer that is over")
}

/// Bytes of which no two pieces, however they are cut, are likely to be equal.
pub(crate) fn pattern(seed: u32, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    draw(seed, &mut bytes);
    bytes
}

/// Writes a pattern.
fn draw(seed: u32, bytes: &mut [u8]) {
    let byte = |at: u32| ((at ^ (seed << 16)).wrapping_mul(0x9E37_79B1) >> 24) as u8;
    bytes.iter_mut().enumerate().for_each(|(at, place)| *place = byte(at as u32));
}

/// Ordinary memory with a pattern in it.
pub(crate) fn patterned(seed: u32, length: usize) -> Pages {
    let mut pages = Pages::new(length).expect("memory for a test");
    draw(seed, pages.as_mut_slice());
    pages
}

/// Ordinary memory that is resident and [`UNTOUCHED`].
pub(crate) fn untouched(length: usize) -> Pages {
    let mut pages = Pages::new(length).expect("memory for a test");
    pages.as_mut_slice().fill(UNTOUCHED);
    pages
}

/// All of `found` is untouched, but for `expected` at an offset.
#[track_caller]
pub(crate) fn check(found: &[u8], at: usize, expected: &[u8], what: &str) {
    let (end, is_untouched) = (at + expected.len(), |&byte: &u8| byte == UNTOUCHED);
    if found[at..end] != *expected {
        let wrong = (0..expected.len()).find(|&index| found[at + index] != expected[index]);
        panic!("{what}: the first wrong byte of {} is at {wrong:?}", expected.len());
    }
    let spilled = found[..at].iter().chain(&found[end..]).position(|byte| !is_untouched(byte));
    assert_eq!(spilled, None, "{what}: a byte beside the {} was written", expected.len());
}
