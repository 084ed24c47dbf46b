//! The loader: its settings, and the calls that start a load.

use std::collections::HashMap;
use std::sync::Arc;

use memferry_copy::{Buffer, DeviceBuffer, Ferry};
use memferry_engine::MemoryKind;

use crate::blocks::{self, Placement};
use crate::error::LoadError;
use crate::loading::{LoadReport, LoadState, Loading, SLOTS_PER_THREAD};
use crate::staging_ring::{SpareRing, StagingRing};
use crate::{FileSource, ReadMode, SafetensorsFile, Tensor};

/// The default size of a block. Shorter ones cost more calls of the driver, longer ones keep the
/// device waiting for the first block.
const BLOCK_BYTES: usize = 2 << 20;
const MIN_BLOCK_BYTES: usize = 64 << 10;
const MAX_BLOCK_BYTES: usize = 16 << 20;
/// More readers than this do not make the bus of any present GPU faster.
const MAX_THREADS: usize = 10;
/// The most memory that staging buffers take, whatever the settings.
const MAX_STAGING_BYTES: usize = 512 << 20;

/// The settings of a [`Loader`].
///
/// ```
/// use memferry::Ferry;
/// use memferry::load::Loader;
///
/// let loader = Loader::builder().threads(2).build(Ferry::new()?)?;
/// assert_eq!(loader.threads(), 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LoaderBuilder {
    threads: Option<usize>,
    block_bytes: Option<usize>,
    mode: ReadMode,
}

impl LoaderBuilder {
    /// How many threads read. The default is a thread for each core, 10 at most.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// How much a thread reads at a time, 64 KiB to 16 MiB, rounded up to a power of two. The
    /// default is 2 MiB.
    pub fn block_bytes(mut self, bytes: usize) -> Self {
        self.block_bytes = Some(bytes);
        self
    }

    /// How files are read.
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.mode = mode;
        self
    }

    /// Makes a loader that copies with this ferry. A load to a device needs one with a GPU.
    pub fn build(self, ferry: Ferry) -> Result<Loader, LoadError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = self.block_bytes.unwrap_or(BLOCK_BYTES);
        let block_bytes = wanted.clamp(MIN_BLOCK_BYTES, MAX_BLOCK_BYTES).next_power_of_two();
        let most = MAX_STAGING_BYTES / block_bytes / SLOTS_PER_THREAD;
        let threads = self.threads.unwrap_or(cores.min(MAX_THREADS)).clamp(1, most);
        Ok(Loader { ferry, threads, block_bytes, mode: self.mode, spare_ring: Arc::default() })
    }
}

/// Loads files. It keeps its staging buffers for the next load.
///
/// ```no_run
/// use memferry::load::{Loader, SafetensorsFile};
/// use memferry::{EngineSelection, Ferry};
///
/// let ferry = Ferry::builder().gpu(EngineSelection::device(0)).build()?;
/// let file = SafetensorsFile::open("model.safetensors")?;
/// let memory = ferry.device_allocator().expect("it was asked for").allocate(file.data_bytes())?;
/// let loader = Loader::builder().build(ferry)?;
/// let (tensors, report) = loader.load_to_device(file, memory)?;
/// println!("{} tensors in {:?}", tensors.tensors().len(), report.elapsed);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Loader {
    ferry: Ferry,
    threads: usize,
    block_bytes: usize,
    mode: ReadMode,
    spare_ring: Arc<SpareRing>,
}

impl Loader {
    /// The settings.
    pub fn builder() -> LoaderBuilder {
        LoaderBuilder::default()
    }

    /// How many threads read.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The ferry it copies with.
    pub fn ferry(&self) -> &Ferry {
        &self.ferry
    }

    /// Starts to load ranges of files to memory of one kind.
    ///
    /// # Safety
    /// Every target must be valid for writes of its length, in memory of this kind that the ferry
    /// reaches, and targets must not overlap. No other code may access them until the returned
    /// load has ended or was dropped.
    pub unsafe fn start_raw(
        &self,
        files: Vec<FileSource>,
        placements: &[Placement],
        memory: MemoryKind,
    ) -> Result<Loading, LoadError> {
        let blocks = blocks::cut(&files, placements, self.block_bytes)?;
        let ring = match memory {
            MemoryKind::Device if !blocks.is_empty() => {
                let slots = self.threads * SLOTS_PER_THREAD;
                let make = || StagingRing::new(&self.ferry, slots, self.block_bytes);
                Some(self.spare_ring.take(make)?)
            }
            _ => None,
        };
        let (ferry, sizes) = (self.ferry.clone(), (self.block_bytes, self.threads));
        let state = LoadState::new(ferry, files, blocks, self.mode, ring, sizes);
        Loading::start(state, self.spare_ring.clone())
    }

    /// Loads all tensors of a file into memory of a device that the ferry reaches. The memory must
    /// have [`SafetensorsFile::data_bytes`] at least.
    pub fn load_to_device(
        &self,
        file: SafetensorsFile,
        memory: DeviceBuffer,
    ) -> Result<(DeviceTensors, LoadReport), LoadError> {
        let (start, length) = (file.data().start, file.data_bytes());
        if memory.len() < length {
            let reason = format!("{length} bytes are needed, {} were passed", memory.len());
            return Err(LoadError::Memory { what: "the tensors on the device", reason });
        }
        let tensors = DeviceTensors::new(memory, &file);
        let placement = Placement::new(0, start, tensors.memory.as_ptr(), length);
        let files = vec![file.into_source()];
        // SAFETY: the memory is owned here, has this length, and lives until the load has ended:
        // both ways out of `wait` join its threads.
        let loading = unsafe { self.start_raw(files, &[placement], MemoryKind::Device)? };
        let report = loading.wait()?;
        Ok((tensors, report))
    }

    /// Loads all tensors of a file to host memory, into one buffer.
    pub fn load_to_host(&self, file: SafetensorsFile) -> Result<(Buffer, LoadReport), LoadError> {
        let (start, length) = (file.data().start, file.data_bytes());
        let failed = |error: std::io::Error| LoadError::Memory {
            what: "the tensors",
            reason: error.to_string(),
        };
        let mut buffer = Buffer::new(length.max(1)).map_err(failed)?;
        let placement = Placement::new(0, start, buffer.as_mut_ptr(), length);
        let files = vec![file.into_source()];
        // SAFETY: the buffer is new, at least of this length, and lives until the load has ended:
        // both ways out of `wait` join its threads.
        let loading = unsafe { self.start_raw(files, &[placement], MemoryKind::Host)? };
        let report = loading.wait()?;
        Ok((buffer, report))
    }
}

/// Tensors in the memory of a device.
///
/// ```no_run
/// # fn show(tensors: memferry::load::DeviceTensors) {
/// let weight = tensors.get("lm_head.weight").expect("a tensor of this name");
/// println!("{:?} at {:#x}", weight.0.shape, weight.1);
/// # }
/// ```
#[derive(Debug)]
pub struct DeviceTensors {
    memory: DeviceBuffer,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    start: u64,
}

impl DeviceTensors {
    fn new(memory: DeviceBuffer, file: &SafetensorsFile) -> Self {
        let tensors = file.tensors().to_vec();
        let by_name = tensors.iter().enumerate().map(|(at, t)| (t.name.clone(), at)).collect();
        Self { memory, tensors, by_name, start: file.data().start }
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// A tensor and its address on the device.
    pub fn get(&self, name: &str) -> Option<(&Tensor, u64)> {
        let tensor = &self.tensors[*self.by_name.get(name)?];
        Some((tensor, self.memory.address() + (tensor.bytes.start - self.start)))
    }

    /// The allocation that has all of them.
    pub fn memory(&self) -> &DeviceBuffer {
        &self.memory
    }
}
