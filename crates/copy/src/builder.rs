//! Builder of a ferry. A setting comes from the caller, else from the environment, else from
//! measurement.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_engine::contract::{CopyDirection, EngineChoice, EngineSelection, OpenOptions};
use memferry_engine::cpu::{CpuEngine, CpuProfile, ProfileSource};
use memferry_engine::{Channel, ChannelOptions, Engine, factories};
use memferry_memory::pin_cache::PinCacheLimits;
use memferry_sys::affinity;
use memferry_sys::copy::stream::Streaming;
use memferry_sys::fork::OwnerProcess;
use memferry_sys::settings::{self, size};

use crate::cookie::{CookieTable, MAX_FERRY};
use crate::error::BuildError;
use crate::ferry::Ferry;
use crate::plan::{CopyPlanContext, DirectionCosts, EngineSummary};
use crate::policy::{Policy, PolicyKind};
use crate::poller::{PollDoorbell, PollThread, ThreadPolledChannel};
use crate::registration::EngineRegistrations;
use crate::submit::{ActiveEngine, DeliveryRates, FerryCore, InlineLimit, ShareRates};
use crate::transfer::{ChannelWaiter, WaitConfig};

const MAX_CHANNELS: usize = 256;
/// Default maximum number of channels that share one transfer: a few cores saturate the memory
/// bandwidth, and each further channel costs a wakeup.
const DEFAULT_SPREAD: usize = 4;
const DEFAULT_WAIT_SPIN_NS: u64 = 20_000;

/// Settings of a new ferry. A setting that the caller does not set comes from the environment
/// (`MEMFERRY_CHANNELS` and the other variables below); one that is set in neither is measured.
///
/// ```
/// use memferry::Ferry;
///
/// let ferry = Ferry::builder().channels(1).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "nothing happens before `build`"]
pub struct FerryBuilder {
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
    /// The selections of devices, by the name of their engine; the last one counts.
    selections: Vec<(&'static str, EngineSelection)>,
    sole_cuda_user: Option<bool>,
    pin_limits: Option<PinCacheLimits>,
}

impl FerryBuilder {
    /// Creates a builder without any setting.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of channels of the processor engine, 1 to 256 (`MEMFERRY_CHANNELS`). More
    /// channels than cores are allowed and share the cores. Default: one less than the number of
    /// cores, at least one.
    pub fn channels(mut self, channels: usize) -> Self {
        self.channels = Some(channels);
        self
    }

    /// Binds the channels of the processor engine to these cores, round-robin.
    pub fn bind_to(mut self, cores: impl IntoIterator<Item = usize>) -> Self {
        self.cores = cores.into_iter().collect();
        self
    }

    /// Sets the policy that distributes transfers over channels (`MEMFERRY_POLICY`: `round-robin`,
    /// `dedicated`, `adaptive` or `sticky`).
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Sets the maximum number of channels that share one transfer (`MEMFERRY_SPREAD`).
    pub fn spread(mut self, spread: usize) -> Self {
        self.spread = Some(spread);
        self
    }

    /// Sets the number of descriptors that a channel holds. When a channel is full, the caller
    /// executes the transfer inline.
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Sets the time in nanoseconds that an idle channel and a waiting caller poll before they
    /// sleep (`MEMFERRY_SPIN_NS`).
    pub fn spin_ns(mut self, spin_ns: u64) -> Self {
        self.spin_ns = Some(spin_ns);
        self
    }

    /// Sets the source of the machine's measured profile (`MEMFERRY_PROFILE`: a file, `measure`,
    /// `off` or `on`).
    pub fn profile(mut self, profile: ProfileSource) -> Self {
        self.profile = profile;
        self
    }

    /// Sets the streaming kernel instead of the fastest measured one (`MEMFERRY_STREAMING`).
    pub fn streaming(mut self, streaming: Streaming) -> Self {
        self.streaming = Some(streaming);
        self
    }

    /// Sets the maximum size in bytes of asynchronous copies that the caller executes inline
    /// (`MEMFERRY_INLINE_BYTES`).
    pub fn inline_bytes(mut self, bytes: usize) -> Self {
        self.inline_bytes = Some(bytes);
        self
    }

    /// Sets the minimum size in bytes of blocking copies that the caller shares with channels
    /// (`MEMFERRY_SPLIT_BYTES`). They are always shared then; without it, those below 4 MiB are shared
    /// while that is measured to be faster.
    pub fn split_bytes(mut self, bytes: usize) -> Self {
        self.split_bytes = Some(bytes);
        self
    }

    /// Sets the minimum size in bytes of copies that bypass the caches (`MEMFERRY_STREAM_BYTES`).
    pub fn stream_bytes(mut self, bytes: usize) -> Self {
        self.stream_bytes = Some(bytes);
        self
    }

    /// Sets the maximum chunk size in bytes of large copies (`MEMFERRY_CHUNK_BYTES`).
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// Adds an engine with `channels` channels. A ferry without named engines uses the processor
    /// engine; a ferry with named engines uses only those.
    pub fn engine(mut self, engine: Arc<dyn Engine>, channels: usize) -> Self {
        self.engines.push(EngineChoice { engine, channels });
        self
    }

    /// Selects a GPU that copies in addition to the processor engine or the named engines
    /// (`MEMFERRY_GPU`: `off`, `auto` or the number of a GPU; used if the program does not call
    /// this). Opening a GPU takes about half a second, mostly in its driver. Default: off.
    pub fn gpu(self, gpu: EngineSelection) -> Self {
        self.select("cuda", gpu)
    }

    /// Selects I/OAT devices, Intel's copy engine, that copy in addition to the processor engine or
    /// the named engines (`MEMFERRY_IOAT`: `off`, `auto`, or addresses; used if the program does
    /// not call this). `memferry doctor` prints how to bind devices to vfio-pci. Default: off.
    pub fn ioat(self, devices: EngineSelection) -> Self {
        self.select("ioat", devices)
    }

    /// Sets the work queues or devices of Intel's data streaming accelerator, in addition to the
    /// named engines (`MEMFERRY_DSA`: `off`, `auto`, work queues such as `wq0.0`, or addresses;
    /// used if the program does not select).
    pub fn dsa(self, devices: EngineSelection) -> Self {
        self.select("dsa", devices)
    }

    /// Selects a network card in loopback mode as a copy engine (`MEMFERRY_NIC`). It is slower than
    /// a processor, but uses no processor time. `auto` uses the first card that is bound to
    /// vfio-pci. Default: off.
    pub fn nic(self, devices: EngineSelection) -> Self {
        self.select("nic", devices)
    }

    fn select(mut self, engine: &'static str, selection: EngineSelection) -> Self {
        self.selections.push((engine, selection));
        self
    }

    /// Declares that no other code in this process uses CUDA: neither a library such as PyTorch nor
    /// the program itself (`MEMFERRY_CUDA_SOLE_USER`: `on` or `off`). Default: no.
    ///
    /// The CUDA driver rejects copies that cross the boundary of a registered range. By default,
    /// only memory that the program [registers](Ferry::register) is therefore registered with a
    /// GPU. If Memferry is the only user of CUDA, it registers reused memory automatically, range
    /// by range, and each range stays registered until it is unmapped or evicted. The setting
    /// applies to all ferries of the process that use the same GPU.
    pub fn sole_cuda_user(mut self, is_sole_user: bool) -> Self {
        self.sole_cuda_user = Some(is_sole_user);
        self
    }

    /// Sets the limits of the pin cache of each engine that needs pinned memory. Memory in flight
    /// beyond these limits is pinned for one use.
    pub fn pin_limits(mut self, limits: PinCacheLimits) -> Self {
        self.pin_limits = Some(limits);
        self
    }

    /// Builds the ferry and opens its channels.
    pub fn build(self) -> Result<Ferry, BuildError> {
        settings::check_variables();
        let split_bytes = or_size(self.split_bytes, "MEMFERRY_SPLIT_BYTES")?;
        let profile = self.corrected_profile(split_bytes)?;
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
        choices.extend(self.open_selected()?);

        let alone = affinity::allowed_cores().len() == 1;
        let waiting = Arc::new(WaitConfig {
            spin_ns: if alone { 0 } else { spin_ns.unwrap_or(DEFAULT_WAIT_SPIN_NS) },
            owner: OwnerProcess::current(),
            caller_chunks: AtomicU64::new(0),
        });
        let (mut engines, mut driven, bell) = (Vec::new(), Vec::new(), PollDoorbell::new());
        if self.engines.is_empty() {
            engines.push(self.open_cpu(&profile, spin_ns, &waiting, &bell, &mut driven)?);
        }
        for choice in choices {
            engines.push(self.open(choice, spin_ns, &waiting, &bell, &mut driven)?);
        }
        let inline_limit = InlineLimit::new(profile.handover_ns, profile.inline_bytes as u64);
        let delivery_rates = DeliveryRates::new(&profile);
        let policy = Policy::new(policy, &profile);
        let facts = CopyPlanContext {
            profile,
            engines: engines.iter().map(engine_summary).collect(),
            spread: spread.unwrap_or(DEFAULT_SPREAD).max(1),
        };
        Ok(Ferry::from_core(FerryCore {
            _poll_thread: PollThread::start(driven, bell)?,
            engines,
            plan_context: facts,
            policy,
            cookies: CookieTable::new(next_ferry()?),
            unwoken_bytes: AtomicU64::new(0),
            wait_config: waiting,
            inline_limit,
            delivery_rates,
            share_rates: split_bytes.is_none().then(ShareRates::new),
        }))
    }

    /// Opens the engines of the selected devices.
    fn open_selected(&self) -> Result<Vec<EngineChoice>, BuildError> {
        let mut choices = Vec::new();
        for factory in factories() {
            let (name, expected) = (factory.name(), factory.expected());
            let set = self.selections.iter().rev().find(|(engine, _)| *engine == name);
            let selection = match set {
                Some((_, selection)) if factory.accepts(selection) => selection.clone(),
                Some((_, wrong)) => {
                    let value = wrong.to_string();
                    return Err(BuildError::Setting { name, value, expected });
                }
                None => environment(factory.variable(), expected, |text| factory.parse(text))?
                    .unwrap_or_default(),
            };
            let options = OpenOptions {
                pin_limits: self.pin_limits,
                is_sole_user: self.sole_cuda_user,
                by_environment: set.is_none(),
            };
            choices.extend(factory.open(&selection, &options)?);
        }
        Ok(choices)
    }

    /// Returns the measured profile with the overrides of the caller and the environment.
    fn corrected_profile(&self, split_bytes: Option<usize>) -> Result<CpuProfile, BuildError> {
        let kernels = Streaming::EXPECTED;
        let mut profile = CpuProfile::clone(&*CpuProfile::load(&self.profile)?);
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
        if let Some(bytes) = or_size(self.inline_bytes, "MEMFERRY_INLINE_BYTES")? {
            profile.inline_bytes = bytes;
        }
        profile.split_bytes = split_bytes.unwrap_or(profile.split_bytes);
        if let Some(bytes) = or_size(self.stream_bytes, "MEMFERRY_STREAM_BYTES")? {
            (profile.stream_bytes, profile.shared_stream_bytes) = (bytes, bytes);
        }
        if let Some(bytes) = or_size(self.chunk_bytes, "MEMFERRY_CHUNK_BYTES")? {
            profile.chunk_bytes = bytes.max(1);
        }
        Ok(profile)
    }

    fn cpu_channels(&self) -> Result<usize, BuildError> {
        const EXPECTED: &str = "a number from 1 to 256";
        let valid = |channels: &usize| (1..=MAX_CHANNELS).contains(channels);
        if let Some(channels) = self.channels {
            return Some(channels).filter(valid).ok_or(BuildError::Setting {
                name: "channels",
                value: channels.to_string(),
                expected: EXPECTED,
            });
        }
        let parse = |text: &str| text.parse().ok().filter(valid);
        let cores = affinity::allowed_cores().len();
        let usual = (cores - 1).clamp(1, MAX_CHANNELS);
        Ok(environment("MEMFERRY_CHANNELS", EXPECTED, parse)?.unwrap_or(usual))
    }

    /// Opens the channels of the processor engine. If threads cannot be started for the default
    /// number of channels, the number is halved until it succeeds; without any thread, the caller
    /// copies alone.
    fn open_cpu(
        &self,
        profile: &CpuProfile,
        spin_ns: Option<u64>,
        waiting: &Arc<WaitConfig>,
        bell: &Arc<PollDoorbell>,
        driven: &mut Vec<Arc<ThreadPolledChannel>>,
    ) -> Result<ActiveEngine, BuildError> {
        let profile = Arc::new(profile.clone());
        let is_asked_for = self.channels.is_some()
            || !self.cores.is_empty()
            || settings::value_of("MEMFERRY_CHANNELS").is_some();
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
        waiting: &Arc<WaitConfig>,
        bell: &Arc<PollDoorbell>,
        driven: &mut Vec<Arc<ThreadPolledChannel>>,
    ) -> Result<ActiveEngine, BuildError> {
        const MAX_DESCRIPTORS: usize = 1 << 20;
        let EngineChoice { engine, channels } = choice;
        let capabilities = engine.capabilities();
        if channels == 0 {
            let (name, value) = ("channels", format!("0 for engine {}", engine.name()));
            let expected = "at least one channel: name a number from 1 on, or leave the engine out";
            return Err(BuildError::Setting { name, value, expected });
        }
        if capabilities.max_descriptor_bytes == 0 || capabilities.boundary_bytes == Some(0) {
            let (name, value) = ("engine", engine.name().to_owned());
            let expected = "an engine that takes at least one byte per descriptor";
            return Err(BuildError::Setting { name, value, expected });
        }
        if let Some(capacity) = self.capacity.filter(|capacity| *capacity > MAX_DESCRIPTORS) {
            let (name, value) = ("capacity", capacity.to_string());
            return Err(BuildError::Setting { name, value, expected: "at most 1048576" });
        }
        let registration = EngineRegistrations::of(&*engine, self.pin_limits.unwrap_or_default())?;
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
        let channels = if capabilities.auto_progress {
            channels
        } else {
            let cost = engine.cost(CopyDirection::HOST_TO_HOST);
            let drive =
                |channel| Arc::new(ThreadPolledChannel::new(channel, bell.clone()).with_cost(cost));
            let fresh: Vec<_> = channels.into_iter().map(drive).collect();
            driven.extend(fresh.iter().cloned());
            fresh.into_iter().map(|channel| channel as Arc<dyn Channel>).collect()
        };
        let lane = |channel: &Arc<dyn Channel>| {
            Arc::new(ChannelWaiter { channel: channel.clone(), config: waiting.clone() })
        };
        let lanes = channels.iter().map(lane).collect();
        let tells = |channel: &Arc<dyn Channel>| channel.completion_of(0).is_some();
        let numbers_suffice = capabilities.infallible
            && capabilities.auto_progress
            && registration.is_none()
            && channels.iter().all(tells);
        let runs_lists = (&*engine as &dyn std::any::Any).is::<CpuEngine>();
        Ok(ActiveEngine {
            engine,
            runs_lists,
            waiters: lanes,
            channels,
            registrations: registration,
            sequence_completion: numbers_suffice,
        })
    }
}

fn engine_summary(open: &ActiveEngine) -> EngineSummary {
    EngineSummary {
        name: open.engine.name().into(),
        devices: open.engine.devices(),
        capabilities: open.engine.capabilities().clone(),
        costs: DirectionCosts::measured(&*open.engine),
        registration_costs: open.engine.registration_costs(),
        channels: open.channels.len(),
        tuning: open.engine.tuning(),
    }
}

/// Returns a new ferry number, the upper bits of its cookies.
fn next_ferry() -> Result<u64, BuildError> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let ferry = NEXT.fetch_add(1, Ordering::Relaxed);
    if ferry > MAX_FERRY { Err(BuildError::TooMany(MAX_FERRY)) } else { Ok(ferry) }
}

/// Returns the caller's value, else that of the environment variable.
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

/// Returns the caller's size in bytes, else that of the environment variable.
fn or_size(set: Option<usize>, name: &'static str) -> Result<Option<usize>, BuildError> {
    let parse = |text: &str| usize::try_from(size::parse(text).ok()?).ok();
    if set.is_some() { Ok(set) } else { environment(name, size::EXPECTED, parse) }
}

fn environment<T>(
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, BuildError> {
    settings::read_variable(name, parse).map_err(|value| BuildError::Environment {
        name,
        value,
        expected,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_an_error_only_if_it_was_named() {
        let named = EngineSelection::device("ffff:ff:1f.7");
        let error = FerryBuilder::new().ioat(named.clone()).build().unwrap_err().to_string();
        assert!(error.contains("ioat") && error.contains("ffff:ff:1f.7"), "{error}");
        let error = FerryBuilder::new().nic(named).build().unwrap_err().to_string();
        assert!(error.contains("nic") && error.contains("ffff:ff:1f.7"), "{error}");
        let two = EngineSelection::Devices(vec!["00:01.0".into(), "00:02.0".into()]);
        let error = FerryBuilder::new().nic(two).build().unwrap_err().to_string();
        assert!(error.contains("one card"), "{error}");
        assert!(FerryBuilder::new().ioat(EngineSelection::Devices(Vec::new())).build().is_err());
        let builder = FerryBuilder::new().ioat(EngineSelection::Auto).nic(EngineSelection::Auto);
        assert!(builder.build().is_ok());
    }
}
