//! Checks of the GPUs that can copy. Each check performs the operation that it reports.

use std::fs;
use std::path::Path;

use anyhow::{anyhow, ensure};
use memferry::engine::cuda::{CudaDeviceInfo, CudaProfile};
use memferry::{CudaEngine, EngineSelection, Ferry};
use memferry_bench::results::size;
use memferry_sys::cuda::{CudaInventory, inventory};
use memferry_sys::settings::{self, switch};
use memferry_sys::userfault;

use super::{Check, DO_AS_SAID, Need, Status};

const VARIABLE: &str = "MEMFERRY_GPU";
const SOLE_USER: &str = "MEMFERRY_CUDA_SOLE_USER";
const BUS: &str = "/sys/bus/pci/devices";

/// All checks, in the order of display.
pub(super) fn checks() -> Vec<Check> {
    let inventory = inventory();
    let devices = match &inventory {
        CudaInventory::Devices(devices) => devices.clone(),
        _ => Vec::new(),
    };
    let mut checks = vec![driver(&inventory, count_on_bus(Path::new(BUS)))];
    if !devices.is_empty() {
        checks.push(registered(
            settings::read_variable(SOLE_USER, switch::parse),
            userfault::probe(),
        ));
    }
    for (facts, bytes) in &devices {
        checks.push(device(facts, *bytes));
        checks.push(a_copy(facts.ordinal, try_copy(facts.ordinal)));
    }
    let set = settings::value_of(VARIABLE).map(|value| value.to_string_lossy().into_owned());
    checks.push(setting(set.as_deref(), devices.len()));
    checks
}

fn driver(inventory: &CudaInventory, on_the_bus: usize) -> Check {
    const NAME: &str = "GPU driver";
    const INSTALL: &str = "install the NVIDIA driver (Debian: sudo apt install nvidia-driver; in a \
                           container: docker run --gpus all); nothing else is needed, no CUDA toolkit";
    const SHOW: &str =
        "nvidia-smi -L, which must list the GPU; in a container: docker run --gpus all";
    let missing = |detail: String| Check::new(NAME, Status::Missing, detail);
    match inventory {
        CudaInventory::NoDriver if on_the_bus > 0 => {
            missing(format!("{on_the_bus} NVIDIA GPU(s), but no driver (libcuda.so.1)"))
                .fix(INSTALL)
        }
        CudaInventory::NoDriver => {
            missing("no NVIDIA GPU and no driver (libcuda.so.1): processors copy".into())
                .fix(format!("if there is a GPU, {INSTALL}"))
                .need(Need::OptionalHardware)
        }
        CudaInventory::Unusable(reason) => {
            missing(format!("the NVIDIA driver cannot be used: {reason}"))
                .fix(format!("{DO_AS_SAID}, then look at {SHOW}"))
        }
        CudaInventory::Devices(devices) => match devices.first() {
            None => missing("the NVIDIA driver sees no GPU".into())
                .fix(format!("unset CUDA_VISIBLE_DEVICES; {SHOW}"))
                .need(if on_the_bus == 0 { Need::OptionalHardware } else { Need::Usual }),
            Some((facts, _)) => {
                let (count, cuda) = (devices.len(), version(facts.driver_version));
                let detail = format!("libcuda.so.1 for CUDA {cuda}, {count} GPU(s)");
                Check::new(NAME, Status::Ok, detail)
            }
        },
    }
}

fn device(facts: &CudaDeviceInfo, bytes: usize) -> Check {
    let read_only = match facts.registers_read_only {
        true => "registers memory that may only be read",
        false => "memory that may only be read passes through rings",
    };
    let detail = format!(
        "{}: {}, {}, {} copy engine(s), {read_only}",
        facts.ordinal,
        facts.name,
        size::format(bytes as u64),
        facts.copy_engines
    );
    Check::new("GPU", Status::Ok, detail)
}

fn registered(
    sole_user: Result<Option<bool>, String>,
    probed: Result<(), userfault::UserfaultDenied>,
) -> Check {
    const NAME: &str = "GPU memory kept";
    match (sole_user, probed) {
        (Ok(None | Some(false)), _) => {
            let detail = format!(
                "only what programs register stays registered with the GPU, as others may use CUDA too; \
                 {SOLE_USER}=1 is for programs in which no other library does"
            );
            Check::new(NAME, Status::Ok, detail)
        }
        (Ok(Some(true)), Ok(())) => {
            let detail = format!(
                "{SOLE_USER}=1 and userfaultfd: memory met twice stays registered with the GPU until it \
                 is unmapped; the limit of locked memory does not matter"
            );
            Check::new(NAME, Status::Ok, detail)
        }
        (Ok(Some(true)), Err(denied)) => {
            let detail = "memory is registered for each copy, or copied through staging buffers";
            Check::new(NAME, Status::Warn, detail).fix(denied.to_string())
        }
        (Err(other), _) => {
            let detail = format!("{SOLE_USER}={other}: not valid, and programs with a GPU fail");
            Check::new(NAME, Status::Warn, detail).fix(format!("export {SOLE_USER}=off, or on"))
        }
    }
}

/// Copies to a GPU and back through an ordinary `Ferry`, and returns the measured profile of the
/// GPU.
fn try_copy(ordinal: usize) -> anyhow::Result<CudaProfile> {
    let ferry = Ferry::builder().gpu(EngineSelection::device(ordinal)).build()?;
    let gpu = ferry.engine_as::<CudaEngine>().ok_or_else(|| anyhow!("the ferry has no GPU"))?;
    copy_round_trip(&ferry, &gpu)?;
    Ok(*gpu.profile())
}

const COPIED_BYTES: usize = 16 << 20;

fn copy_round_trip(ferry: &Ferry, gpu: &CudaEngine) -> anyhow::Result<()> {
    let source: Vec<u8> = (0..COPIED_BYTES).map(|at| (at ^ (at >> 8)) as u8).collect();
    let mut back = vec![0; COPIED_BYTES];
    let mut memory = gpu.allocate(COPIED_BYTES)?;
    ferry.copy_to_device(&source, &mut memory, 0)?;
    ferry.copy_from_device(&memory, 0, &mut back)?;
    ensure!(
        source == back,
        "arrived with wrong bytes: test the memory of the GPU, then report this"
    );
    Ok(())
}

fn a_copy(ordinal: usize, tried: anyhow::Result<CudaProfile>) -> Check {
    const NAME: &str = "a GPU copy";
    let rates = match tried {
        Ok(rates) => rates,
        Err(error) => {
            return Check::new(NAME, Status::Missing, format!("{ordinal}: {error:#}"))
                .fix(format!("{DO_AS_SAID}; nvidia-smi tells more about the GPU"));
        }
    };
    let detail = format!(
        "{ordinal}: {} there and back; {:.0} GB/s in, {:.0} GB/s out, {:.0} GB/s from memory to \
         memory; {:.0} GB/s to register ({:.0} GB/s on huge pages), {:.0} GB/s through one ring; \
         {:.0} µs to begin",
        size::format(COPIED_BYTES as u64),
        rates.host_to_device,
        rates.device_to_host,
        rates.host_to_host,
        rates.register,
        rates.register_huge,
        rates.staging,
        rates.startup_ns / 1000.0
    );
    let summary = format!(
        "GPU {ordinal}: {:.0} GB/s in, {:.0} GB/s out",
        rates.host_to_device, rates.device_to_host
    );
    Check::new(NAME, Status::Ok, detail).summary(summary)
}

/// The check of the environment variable that selects a GPU for programs without a choice of their
/// own.
fn setting(value: Option<&str>, count: usize) -> Check {
    let numbers = match count {
        0 => "0 and so on".to_owned(),
        count => (0..count).map(|n| n.to_string()).collect::<Vec<_>>().join(", "),
    };
    let check = |status, detail: String| Check::new(VARIABLE, status, detail);
    let Some(value) = value else {
        let detail = format!(
            "not set: programs use a GPU if they ask for it (FerryBuilder::gpu, adma_use_gpu); auto or a \
             number ({numbers}) gives one to all"
        );
        return check(Status::Ok, detail);
    };
    match value.trim() {
        "off" => check(Status::Ok, "off: only programs that ask for a GPU use one".into()),
        "auto" if count > 0 => check(Status::Ok, "auto: all programs use GPU 0".into()),
        "auto" => check(Status::Ok, "auto: all programs would use a GPU, and work without".into()),
        number => match number.parse::<usize>() {
            Ok(number) if number < count => {
                check(Status::Ok, format!("{number}: all programs use this GPU"))
            }
            Ok(number) => {
                check(Status::Warn, format!("{number}: programs fail, as this GPU cannot be used"))
                    .fix(format!("export {VARIABLE}=auto"))
            }
            Err(_) => check(Status::Warn, format!("{value}: not valid, and programs fail"))
                .fix(format!("export {VARIABLE}=auto, or off, or a number ({numbers})")),
        },
    }
}

/// The number of NVIDIA GPUs on the PCI bus, with or without a driver.
fn count_on_bus(folder: &Path) -> usize {
    const VENDOR: &str = "0x10de";
    const DISPLAY: &str = "0x03";
    let Ok(devices) = fs::read_dir(folder) else { return 0 };
    let says = |device: &Path, file: &str, start: &str| {
        fs::read_to_string(device.join(file)).is_ok_and(|text| text.starts_with(start))
    };
    let devices = devices.flatten().map(|device| device.path());
    devices.filter(|at| says(at, "vendor", VENDOR) && says(at, "class", DISPLAY)).count()
}

/// A CUDA version as text: 12040 is `12.4`.
fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests;
