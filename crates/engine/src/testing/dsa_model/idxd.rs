//! The model behind the kernel's driver: its queues are files, described by a folder like sysfs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use memferry_sys::device::DmaDevice;
use memferry_sys::idxd::sysfs::IdxdBus;
use memferry_sys::idxd::{IdxdFile, IdxdFiles, code};
use memferry_sys::portal::{Portal, PortalWatcher, PortalWords};
use memferry_sys::sync::lock;

use super::memory::DsaModelMemory;
use super::{DsaModel, DsaModelBuilder, DsaModelShared};
use crate::dsa::descriptor::{DsaDescriptor, opcode};
use crate::dsa::record::RECORD_BYTES;
use crate::dsa::registers::{self, DsaState, QueueConfig};
use crate::dsa::{DsaEngine, IdxdQueueChoice};

impl DsaEngine {
    /// Creates the engine over a model behind the kernel's driver, with the queues that the model's
    /// folder describes.
    pub fn over_idxd_model(model: Arc<IdxdModel>) -> io::Result<Self> {
        let queues = model.queue_choices();
        // SAFETY: the model accesses memory through the kernel, and waits at the end of a file.
        unsafe { Self::over_queues(model, queues) }
    }
}

/// The properties of the modelled kernel driver.
#[derive(Debug, Clone)]
pub struct IdxdModelOptions {
    /// Whether queues are dedicated, not shared.
    pub is_dedicated: bool,
    /// Whether the kernel permits the mapping of portals.
    pub may_map: bool,
    /// The device behind it.
    pub device: DsaModelBuilder,
}

impl Default for IdxdModelOptions {
    /// Shared queues whose portals can be mapped.
    fn default() -> Self {
        Self { is_dedicated: false, may_map: true, device: DsaModel::builder() }
    }
}

/// A device behind a model of the kernel's driver.
#[derive(Debug)]
pub struct IdxdModel {
    model: Arc<DsaModel>,
    root: PathBuf,
    options: IdxdModelOptions,
    /// How often each queue is open.
    open: Mutex<Vec<usize>>,
    /// The number of files that are open, which a forked child would inherit.
    descriptors: AtomicUsize,
    opens: AtomicU64,
    /// For its files.
    this: Weak<Self>,
}

impl IdxdModel {
    /// Creates the device, and the folder that describes it.
    pub fn new(options: IdxdModelOptions) -> io::Result<Arc<Self>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("memferry-idxd-model-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let model = options.device.clone().build_over(DsaModelMemory::SharedVirtual);
        let queues = options.device.queues;
        let open = Mutex::new(vec![0; queues]);
        let found = Arc::new_cyclic(|this| Self {
            model,
            root,
            options,
            open,
            descriptors: AtomicUsize::new(0),
            opens: AtomicU64::new(0),
            this: this.clone(),
        });
        found.write_folder()?;
        found.configure();
        Ok(found)
    }

    /// The folder that stands for `/`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The queues that the folder describes.
    pub fn queue_choices(&self) -> Vec<IdxdQueueChoice> {
        let devices = IdxdBus::with_root(self.root()).devices();
        let queues = devices
            .iter()
            .flat_map(|device| device.queues.iter().map(move |queue| (device, queue)))
            .filter_map(|(device, queue)| IdxdQueueChoice::of(device, queue));
        queues.collect()
    }

    /// The number of times that a queue was opened.
    pub fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// The device: its faults, counters and violations.
    pub fn device(&self) -> &DsaModel {
        &self.model
    }

    /// The number of open files: a queue whose portal is mapped needs none.
    pub fn open_descriptors(&self) -> usize {
        self.descriptors.load(Ordering::Relaxed)
    }

    /// The number of open queues.
    pub fn open_queues(&self) -> usize {
        lock(&self.open).iter().sum()
    }

    fn shared(&self) -> &DsaModelShared {
        &self.model.shared
    }

    fn queue_size(&self) -> u32 {
        (self.options.device.total_size / self.options.device.queues as u32).max(1)
    }

    /// Configures and enables all queues, as an administrator does.
    fn configure(&self) {
        let device = &self.options.device;
        let config = QueueConfig {
            size: self.queue_size() as u16,
            is_dedicated: self.options.is_dedicated,
            block_on_fault: false,
            priority: 1,
            transfer_shift: device.transfer_shift,
            batch_shift: device.batch_shift,
        };
        let mut state = self.shared().state.lock();
        state.state = DsaState::Enabled;
        for queue in &mut state.queues {
            queue.words[..config.words().len()].copy_from_slice(&config.words());
            queue.words[registers::QUEUE_OPCODES / 4..].fill(u32::MAX);
            queue.is_enabled = true;
        }
    }

    fn write_folder(&self) -> io::Result<()> {
        let device = &self.options.device;
        let devices = self.root.join("sys/bus/dsa/devices");
        let words = [device.opcodes >> 32, device.opcodes & 0xFFFF_FFFF];
        let opcodes = format!("00000000,00000000,{:08x},{:08x}", words[0], words[1]);
        write_files(
            &devices.join("dsa0"),
            &[
                ("state", "enabled".into()),
                ("version", format!("{:#x}", device.version)),
                ("pasid_enabled", "1".into()),
                ("numa_node", "0".into()),
                ("op_cap", opcodes),
                ("max_work_queues_size", device.total_size.to_string()),
            ],
        )?;
        let files = self.root.join("dev/dsa");
        fs::create_dir_all(&files)?;
        for number in 0..device.queues {
            let name = format!("wq0.{number}");
            fs::write(files.join(&name), "")?;
            let mode = if self.options.is_dedicated { "dedicated" } else { "shared" };
            write_files(
                &devices.join(&name),
                &[
                    ("state", "enabled".into()),
                    ("type", "user".into()),
                    ("mode", mode.into()),
                    ("size", self.queue_size().to_string()),
                    ("max_transfer_size", (1u64 << device.transfer_shift).to_string()),
                    ("max_batch_size", (1u32 << device.batch_shift).to_string()),
                    ("block_on_fault", "0".into()),
                ],
            )?;
        }
        Ok(())
    }
}

fn write_files(folder: &Path, files: &[(&str, String)]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    files.iter().try_for_each(|(name, text)| fs::write(folder.join(name), format!("{text}\n")))
}

impl Drop for IdxdModel {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

impl IdxdFiles for IdxdModel {
    fn open(&self, path: &Path) -> io::Result<Box<dyn IdxdFile>> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("wq0.").and_then(|digits| digits.parse::<usize>().ok());
        let mut open = lock(&self.open);
        let queue = number.filter(|number| *number < open.len() && path.exists());
        let queue = queue.ok_or(io::ErrorKind::NotFound)?;
        if self.options.is_dedicated && open[queue] > 0 {
            return Err(io::Error::from_raw_os_error(code::EBUSY));
        }
        let kernel = self.this.upgrade().ok_or(io::ErrorKind::NotFound)?;
        open[queue] += 1;
        drop(open);
        self.opens.fetch_add(1, Ordering::Relaxed);
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(IdxdModelFile { open: Arc::new(OpenQueue { kernel, queue }) }))
    }

    fn name(&self, path: &Path) -> String {
        let queue = path.file_name().unwrap_or_default().to_string_lossy();
        format!("{queue} of {}", self.model.name())
    }

    fn patience(&self) -> Duration {
        self.model.patience()
    }
}

/// An open queue: files and portals keep it open.
#[derive(Debug)]
struct OpenQueue {
    kernel: Arc<IdxdModel>,
    queue: usize,
}

impl Drop for OpenQueue {
    fn drop(&mut self) {
        // Each queue is opened once here, so that its end is the end of its descriptors.
        self.kernel.shared().state.drain(self.queue);
        lock(&self.kernel.open)[self.queue] -= 1;
    }
}

// SAFETY: the page exists as long as the device, which the queue keeps, and the device accesses it by
// atomic words.
unsafe impl PortalWatcher for OpenQueue {
    fn memory(&self) -> (NonNull<u8>, usize) {
        self.kernel.shared().state.portals.page(self.queue)
    }

    fn takes_direct_stores(&self) -> bool {
        self.kernel.shared().takes_direct_stores()
    }

    fn wake(&self) {
        self.kernel.shared().state.wake();
    }

    fn enqueue(&self, _at: usize, descriptor: &PortalWords) -> bool {
        self.kernel.shared().enqueue(self.queue, descriptor)
    }
}

/// The file of an open queue.
#[derive(Debug)]
struct IdxdModelFile {
    open: Arc<OpenQueue>,
}

impl IdxdFile for IdxdModelFile {
    fn map_portal(&mut self, is_dedicated: bool) -> io::Result<Arc<Portal>> {
        let options = &self.open.kernel.options;
        if !options.may_map {
            return Err(io::Error::from_raw_os_error(code::EPERM));
        }
        if is_dedicated != options.is_dedicated {
            let violation = "a portal was mapped for the wrong mode";
            self.open.kernel.shared().record_violation(violation.into());
        }
        self.open.kernel.shared().state.portals.restart(self.open.queue);
        Ok(Arc::new(Portal::watched(self.open.clone())))
    }

    unsafe fn write(&mut self, descriptors: &[PortalWords]) -> io::Result<usize> {
        let OpenQueue { kernel, queue } = &*self.open;
        let shared = kernel.shared();
        let refused = lock(&shared.script).faults.write_error;
        for (count, words) in descriptors.iter().enumerate() {
            let descriptor = DsaDescriptor::from_words(*words);
            let is_refused =
                descriptor.opcode() == opcode::BATCH && kernel.options.device.version < 0x200;
            let is_aligned =
                descriptor.record().is_none_or(|record| record.is_multiple_of(RECORD_BYTES as u64));
            let error = if refused != 0 {
                Some(refused)
            } else if is_refused || !is_aligned {
                shared.record_violation("a batch, or a record out of line, was written".into());
                Some(code::EINVAL)
            } else if !shared.submit(*queue, words, kernel.options.is_dedicated) {
                Some(code::EAGAIN)
            } else {
                None
            };
            match error {
                Some(code) if count == 0 => return Err(io::Error::from_raw_os_error(code)),
                Some(_) => return Ok(count),
                None => (),
            }
        }
        Ok(descriptors.len())
    }
}

impl Drop for IdxdModelFile {
    fn drop(&mut self) {
        self.open.kernel.descriptors.fetch_sub(1, Ordering::Relaxed);
    }
}
