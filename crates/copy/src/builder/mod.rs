//! Building a ferry: settings from the caller, then from the environment, then from measurement.

mod pci;

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_engine::cpu::{CpuEngine, Profile, ProfileSource};
use memferry_engine::cuda::{self, CudaEngine};
use memferry_engine::{Channel, ChannelOptions, Engine, OpenError};
use memferry_memory::pin_cache::Limits;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::{affinity, fork};

pub use pci::PciDevices;

use crate::carry::{Inner, OpenEngine};
use crate::cookie::{CookieTable, LARGEST_FERRY};
use crate::driver::{Bell, Driven, Driver};
use crate::error::BuildError;
use crate::ferry::Ferry;
use crate::plan::{Costs, EngineFacts, Facts};
use crate::policy::PolicyKind;
use crate::registration::Registration;
use crate::transfer::{Lane, Waiting};

const MOST_CHANNELS: usize = 256;
/// One transfer is spread over at most this many channels unless told otherwise: a few cores
/// saturate the memory, and every further one has to be woken.
const DEFAULT_SPREAD: usize = 4;
/// Channels of a GPU: as many as it takes to feed it with memory that passes through rings.
const MOST_GPU_CHANNELS: usize = 10;
const DEFAULT_WAIT_SPIN_NS: u64 = 20_000;

/// An engine and how many channels to open on it.
#[derive(Debug, Clone)]
pub struct EngineChoice {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// How many channels.
    pub channels: usize,
}

/// Settings for a new ferry. What is not set here is taken from the environment
/// (`MEMFERRY_CHANNELS` and the others named below), and what is not set there is measured.
#[derive(Debug, Clone, Default)]
#[must_use = "nothing happens before `build`"]
pub struct Builder {
    channels: Option<usize>,
    cores: Vec<usize>,
    policy: Option<PolicyKind>,
    spread: Option<usize>,
    capacity: Option<usize>,
    spin_ns: Option<u64>,
    profile: ProfileSource,
    streaming: Option<Streaming>,
    inline_bytes: Option<usize>,
    split_bytes: Option<usize>,
    stream_bytes: Option<usize>,
    chunk_bytes: Option<usize>,
    engines: Vec<EngineChoice>,
    gpu: Option<Gpu>,
    sole_cuda_user: Option<bool>,
    ioat: Option<PciDevices>,
    nic: Option<PciDevices>,
    pin_limits: Option<Limits>,
}

/// Whether a GPU moves memory too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Gpu {
    /// None does, and its driver is not looked for.
    #[default]
    Off,
    /// The first one, if there is one that can be used.
    IfPresent,
    /// The one of this number; without it there is no ferry.
    Number(usize),
}

impl Gpu {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "off" => Some(Self::Off),
            "auto" => Some(Self::IfPresent),
            number => number.parse().ok().map(Self::Number),
        }
    }
}

impl Builder {
    /// Nothing set.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many channels the processor engine has, 1 to 256 (`MEMFERRY_CHANNELS`). More than there
    /// are cores is allowed; they share them. Usual: one less than there are cores, at least one.
    pub fn channels(mut self, channels: usize) -> Self {
        self.channels = Some(channels);
        self
    }

    /// Binds the channels of the processor engine to these cores, in turn.
    pub fn bind_to(mut self, cores: impl IntoIterator<Item = usize>) -> Self {
        self.cores = cores.into_iter().collect();
        self
    }

    /// How transfers are spread over channels (`MEMFERRY_POLICY`: `round-robin`, `dedicated`,
    /// `adaptive` or `sticky`).
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = Some(policy);
        self
    }

    /// The most channels that one transfer is spread over (`MEMFERRY_SPREAD`).
    pub fn spread(mut self, spread: usize) -> Self {
        self.spread = Some(spread);
        self
    }

    /// How many descriptors a channel holds. Beyond that, callers carry out transfers themselves.
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// How long an idle channel looks for work before it sleeps, and a waiting caller before it
    /// does (`MEMFERRY_SPIN_NS`).
    pub fn spin_ns(mut self, spin_ns: u64) -> Self {
        self.spin_ns = Some(spin_ns);
        self
    }

    /// Where the measured profile of the machine comes from (`MEMFERRY_PROFILE`: a file, `measure`
    /// or `off`).
    pub fn profile(mut self, profile: ProfileSource) -> Self {
        self.profile = profile;
        self
    }

    /// The streaming kernel, in place of the measured best (`MEMFERRY_STREAMING`).
    pub fn streaming(mut self, streaming: Streaming) -> Self {
        self.streaming = Some(streaming);
        self
    }

    /// Asynchronous copies up to this size are done at once by the caller
    /// (`MEMFERRY_INLINE_BYTES`).
    pub fn inline_bytes(mut self, bytes: usize) -> Self {
        self.inline_bytes = Some(bytes);
        self
    }

    /// Blocking copies from this size on are shared with channels (`MEMFERRY_SPLIT_BYTES`).
    pub fn split_bytes(mut self, bytes: usize) -> Self {
        self.split_bytes = Some(bytes);
        self
    }

    /// Copies from this size on go around the caches (`MEMFERRY_STREAM_BYTES`).
    pub fn stream_bytes(mut self, bytes: usize) -> Self {
        self.stream_bytes = Some(bytes);
        self
    }

    /// The largest chunk that a large copy is cut into (`MEMFERRY_CHUNK_BYTES`).
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// Uses this engine with so many channels. If no engine is named, the processor engine is
    /// used; if any is, only those named are.
    pub fn engine(mut self, engine: Arc<dyn Engine>, channels: usize) -> Self {
        self.engines.push(EngineChoice { engine, channels });
        self
    }

    /// Whether a GPU moves memory too, beside the processor engine or the engines named
    /// (`MEMFERRY_GPU`: `off`, `auto` or the number of a GPU; for programs that do not call this). Opening one takes about half a second,
    /// most of which its driver needs. Usual: off.
    pub fn gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// Whether nobody else uses CUDA in this process: no other library such as PyTorch, and no code of
    /// the program itself (`MEMFERRY_CUDA_SOLE_USER`: `0` or `1`). Usual: no.
    ///
    /// A driver refuses copies that cross the edge of registered memory. So by default nothing is
    /// registered with a GPU but what the program [registers](Ferry::register). The only user of CUDA may
    /// say so: then memory that is copied again is registered by itself, in pieces, and stays so until it
    /// is unmapped or makes room. It holds for all ferries of the process that use the same GPU.
    pub fn sole_cuda_user(mut self, is_sole_user: bool) -> Self {
        self.sole_cuda_user = Some(is_sole_user);
        self
    }

    /// How much memory is kept pinned for later, for each engine that needs pinned memory. What is
    /// in flight beyond that is pinned for its one use.
    pub fn pin_limits(mut self, limits: Limits) -> Self {
        self.pin_limits = Some(limits);
        self
    }

    /// Builds the ferry and opens its channels.
    pub fn build(self) -> Result<Ferry, BuildError> {
        let profile = self.corrected_profile()?;
        let policy = match self.policy {
            Some(policy) => policy,
            None => environment(
                "MEMFERRY_POLICY",
                "round-robin, dedicated, adaptive or sticky",
                PolicyKind::from_name,
            )?
            .unwrap_or_default(),
        };
        let spread = or_environment(self.spread, "MEMFERRY_SPREAD", "a number above 0")?;
        let spin_ns = or_environment(self.spin_ns, "MEMFERRY_SPIN_NS", "a number of nanoseconds")?;
        let mut choices = self.engines.clone();
        choices.extend(self.open_pci()?);
        let gpu = self.open_gpu()?;
        if let Some(gpu) = &gpu {
            let channels = (affinity::allowed_cores().len() * 5 / 8).clamp(1, MOST_GPU_CHANNELS);
            choices.push(EngineChoice { engine: gpu.clone(), channels });
        }

        fork::watch();
        let alone = affinity::allowed_cores().len() == 1;
        let waiting = Arc::new(Waiting {
            spin_ns: if alone { 0 } else { spin_ns.unwrap_or(DEFAULT_WAIT_SPIN_NS) },
            fork_generation: fork::generation(),
            helped_chunks: AtomicU64::new(0),
        });
        let (mut engines, mut driven, bell) = (Vec::new(), Vec::new(), Bell::new());
        if self.engines.is_empty() {
            engines.push(self.open_cpu(&profile, spin_ns, &waiting, &bell, &mut driven)?);
        }
        for choice in choices {
            engines.push(self.open(choice, spin_ns, &waiting, &bell, &mut driven)?);
        }
        let facts = Facts {
            profile,
            engines: engines.iter().map(engine_facts).collect(),
            spread: spread.unwrap_or(DEFAULT_SPREAD).max(1),
        };
        Ok(Ferry::from_inner(Inner {
            _driver: Driver::start(driven, bell)?,
            engines,
            facts,
            policy: policy.build(),
            cookies: CookieTable::new(next_ferry()?),
            owed_bytes: AtomicU64::new(0),
            waiting,
            gpu,
        }))
    }

    /// Opens the GPU that is wanted, if any is.
    fn open_gpu(&self) -> Result<Option<Arc<CudaEngine>>, BuildError> {
        let expected = "off, auto or the number of a GPU";
        let gpu = match self.gpu {
            Some(gpu) => gpu,
            None => environment("MEMFERRY_GPU", expected, Gpu::from_name)?.unwrap_or_default(),
        };
        let by_environment = self.gpu.is_none();
        let mut settings = cuda::Settings::default();
        settings.limits = self.pin_limits.unwrap_or(settings.limits);
        settings.is_sole_user = match self.sole_cuda_user {
            Some(is_sole_user) => is_sole_user,
            None => environment("MEMFERRY_CUDA_SOLE_USER", "0 or 1", |text| match text {
                "0" => Some(false),
                "1" => Some(true),
                _ => None,
            })?
            .unwrap_or(false),
        };
        match gpu {
            Gpu::Off => Ok(None),
            Gpu::Number(ordinal) => {
                settings.ordinal = ordinal;
                let opened = open_gpu(settings).map_err(|error| match error {
                    OpenError::System { engine, reason } if by_environment => {
                        let asked = format!("MEMFERRY_GPU={ordinal} asks for it");
                        let reason = format!("{reason} ({asked}: unset it, or set it to auto)");
                        OpenError::System { engine, reason }
                    }
                    error => error,
                });
                Ok(Some(Arc::new(opened?)))
            }
            Gpu::IfPresent => match open_gpu(settings) {
                Ok(engine) => Ok(Some(Arc::new(engine))),
                Err(error) => {
                    tracing::info!(%error, "no GPU is used");
                    Ok(None)
                }
            },
        }
    }

    /// The measured profile with what the caller and the environment know better.
    fn corrected_profile(&self) -> Result<Profile, BuildError> {
        const BYTES: &str = "a number of bytes";
        let kernels = "the name of a streaming kernel that this processor supports";
        let mut profile = Profile::clone(&*Profile::load(&self.profile)?);
        let supported = |kernel: &Streaming| kernel.is_supported();
        if let Some(streaming) = self.streaming {
            if !supported(&streaming) {
                let value = streaming.name().into();
                return Err(BuildError::Setting { name: "streaming", value, expected: kernels });
            }
            profile.streaming = streaming;
        } else if let Some(streaming) = environment("MEMFERRY_STREAMING", kernels, |text| {
            Streaming::from_name(text).filter(supported)
        })? {
            profile.streaming = streaming;
        }
        if let Some(bytes) = or_environment(self.inline_bytes, "MEMFERRY_INLINE_BYTES", BYTES)? {
            profile.inline_bytes = bytes;
        }
        if let Some(bytes) = or_environment(self.split_bytes, "MEMFERRY_SPLIT_BYTES", BYTES)? {
            profile.split_bytes = bytes;
        }
        if let Some(bytes) = or_environment(self.stream_bytes, "MEMFERRY_STREAM_BYTES", BYTES)? {
            (profile.stream_bytes, profile.shared_stream_bytes) = (bytes, bytes);
        }
        if let Some(bytes) = or_environment(self.chunk_bytes, "MEMFERRY_CHUNK_BYTES", BYTES)? {
            profile.chunk_bytes = bytes.max(1);
        }
        Ok(profile)
    }

    fn cpu_channels(&self) -> Result<usize, BuildError> {
        const EXPECTED: &str = "a number from 1 to 256";
        let valid = |channels: &usize| (1..=MOST_CHANNELS).contains(channels);
        if let Some(channels) = self.channels {
            return Some(channels).filter(valid).ok_or(BuildError::Setting {
                name: "channels",
                value: channels.to_string(),
                expected: EXPECTED,
            });
        }
        let parse = |text: &str| text.parse().ok().filter(valid);
        let cores = affinity::allowed_cores().len();
        let usual = (cores - 1).clamp(1, MOST_CHANNELS);
        Ok(environment("MEMFERRY_CHANNELS", EXPECTED, parse)?.unwrap_or(usual))
    }

    /// Opens the processor's channels. Where no thread can be started for as many as are usual, fewer
    /// do, and in the end none: the caller then copies alone.
    fn open_cpu(
        &self,
        profile: &Profile,
        spin_ns: Option<u64>,
        waiting: &Arc<Waiting>,
        bell: &Arc<Bell>,
        driven: &mut Vec<Arc<Driven>>,
    ) -> Result<OpenEngine, BuildError> {
        let profile = Arc::new(profile.clone());
        let is_asked_for = self.channels.is_some()
            || !self.cores.is_empty()
            || std::env::var_os("MEMFERRY_CHANNELS").is_some();
        let mut channels = self.cpu_channels()?;
        loop {
            let engine = Arc::new(CpuEngine::new(profile.clone()));
            let choice = EngineChoice { engine, channels };
            let error = match self.open(choice, spin_ns, waiting, bell, driven) {
                Err(BuildError::Open(error)) if !is_asked_for => error,
                outcome => return outcome,
            };
            channels /= 2;
            if channels == 0 {
                tracing::warn!(%error, "copies are done by the calling thread alone");
                let engine = Arc::new(CpuEngine::without_threads(profile));
                let choice = EngineChoice { engine, channels: 1 };
                return self.open(choice, spin_ns, waiting, bell, driven);
            }
        }
    }

    fn open(
        &self,
        choice: EngineChoice,
        spin_ns: Option<u64>,
        waiting: &Arc<Waiting>,
        bell: &Arc<Bell>,
        driven: &mut Vec<Arc<Driven>>,
    ) -> Result<OpenEngine, BuildError> {
        const MOST_DESCRIPTORS: usize = 1 << 20;
        let EngineChoice { engine, channels } = choice;
        let capabilities = engine.capabilities();
        if channels == 0 {
            let (name, value) = ("channels", format!("0 for engine {}", engine.name()));
            let expected = "at least one channel: name a number from 1 on, or leave the engine out";
            return Err(BuildError::Setting { name, value, expected });
        }
        if capabilities.largest_descriptor_bytes == 0 || capabilities.boundary_bytes == Some(0) {
            let (name, value) = ("engine", engine.name().to_owned());
            let expected = "an engine that takes at least one byte per descriptor";
            return Err(BuildError::Setting { name, value, expected });
        }
        if let Some(capacity) = self.capacity.filter(|capacity| *capacity > MOST_DESCRIPTORS) {
            let (name, value) = ("capacity", capacity.to_string());
            return Err(BuildError::Setting { name, value, expected: "at most 1048576" });
        }
        let registration = Registration::of(&*engine, self.pin_limits.unwrap_or_default())?;
        let channels: Vec<Arc<dyn Channel>> = (0..channels)
            .map(|index| {
                engine.open_channel(&ChannelOptions {
                    core: (!self.cores.is_empty()).then(|| self.cores[index % self.cores.len()]),
                    capacity: self.capacity,
                    spin_ns,
                    label: Some(format!("memferry-{index}")),
                })
            })
            .collect::<Result<_, _>>()?;
        let channels = if capabilities.self_driving {
            channels
        } else {
            let drive = |channel| Arc::new(Driven::new(channel, bell.clone()));
            let fresh: Vec<_> = channels.into_iter().map(drive).collect();
            driven.extend(fresh.iter().cloned());
            fresh.into_iter().map(|channel| channel as Arc<dyn Channel>).collect()
        };
        let lane = |channel: &Arc<dyn Channel>| {
            Arc::new(Lane { channel: channel.clone(), waiting: waiting.clone() })
        };
        let lanes = channels.iter().map(lane).collect();
        let tells = |channel: &Arc<dyn Channel>| channel.completion_of(0).is_some();
        let numbers_suffice = capabilities.never_fails
            && capabilities.self_driving
            && registration.is_none()
            && channels.iter().all(tells);
        Ok(OpenEngine { engine, lanes, channels, registration, numbers_suffice })
    }
}

#[cfg(feature = "cuda")]
fn open_gpu(settings: cuda::Settings) -> Result<CudaEngine, OpenError> {
    CudaEngine::open(settings)
}

#[cfg(not(feature = "cuda"))]
fn open_gpu(_settings: cuda::Settings) -> Result<CudaEngine, OpenError> {
    let reason = "this program was built without it: build with the feature `cuda`".into();
    Err(OpenError::System { engine: "cuda".into(), reason })
}

fn engine_facts(open: &OpenEngine) -> EngineFacts {
    EngineFacts {
        name: open.engine.name().into(),
        capabilities: open.engine.capabilities().clone(),
        costs: Costs::measured(&*open.engine),
        preparation: open.engine.preparation(),
        channels: open.channels.len(),
    }
}

/// A fresh name for a ferry's cookies.
fn next_ferry() -> Result<u64, BuildError> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let ferry = NEXT.fetch_add(1, Ordering::Relaxed);
    if ferry > LARGEST_FERRY { Err(BuildError::TooMany(LARGEST_FERRY)) } else { Ok(ferry) }
}

/// The value set by the caller, else the one in the environment.
fn or_environment<T: FromStr>(
    set: Option<T>,
    name: &'static str,
    expected: &'static str,
) -> Result<Option<T>, BuildError> {
    match set {
        Some(value) => Ok(Some(value)),
        None => environment(name, expected, |text| text.parse().ok()),
    }
}

fn environment<T>(
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, BuildError> {
    let Some(value) = std::env::var_os(name) else {
        return Ok(None);
    };
    let value = value.to_string_lossy().into_owned();
    match parse(value.trim()) {
        Some(parsed) => Ok(Some(parsed)),
        None => Err(BuildError::Environment { name, value, expected }),
    }
}
