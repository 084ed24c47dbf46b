use std::sync::Arc;

use memferry::PinLimits;
use memferry::engine::cpu::ProfileSource;
use memferry::engine::cuda::model::ModelDevice;

use super::*;

fn facts() -> DeviceFacts {
    DeviceFacts {
        ordinal: 0,
        name: "Invented GPU".into(),
        driver_version: 12_080,
        copy_engines: 3,
        registers_read_only: true,
    }
}

#[test]
fn a_machine_without_a_gpu_is_told_so_and_what_a_gpu_would_need() {
    let check = driver(&Inventory::NoDriver, 0);
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.contains("no NVIDIA GPU"), "{}", check.detail);
    assert!(check.cure.unwrap().contains("no CUDA toolkit"));
}

#[test]
fn a_gpu_without_its_driver_is_seen_on_the_bus() {
    let bus = tempfile::TempDir::new().unwrap();
    let devices = [
        ("gpu", "0x10de", "0x030200"),
        ("sound", "0x10de", "0x040300"),
        ("net", "0x15b3", "0x020000"),
    ];
    for (name, vendor, class) in devices {
        let device = bus.path().join(name);
        fs::create_dir(&device).unwrap();
        fs::write(device.join("vendor"), vendor).unwrap();
        fs::write(device.join("class"), class).unwrap();
    }
    assert_eq!(on_the_bus(bus.path()), 1);
    assert_eq!(on_the_bus(&bus.path().join("nothing")), 0);
    let check = driver(&Inventory::NoDriver, 1);
    assert!(check.detail.contains("1 NVIDIA GPU(s), but no driver"), "{}", check.detail);
    assert!(check.cure.unwrap().starts_with("install the NVIDIA driver"));
}

#[test]
fn a_driver_that_cannot_be_used_says_why() {
    let check = driver(&Inventory::Unusable("it is for CUDA 10.2".into()), 1);
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.contains("CUDA 10.2") && check.cure.is_some());
    assert_eq!(driver(&Inventory::Devices(vec![]), 1).status, Status::Missing);
}

#[test]
fn a_gpu_is_shown_with_what_it_has() {
    let check = driver(&Inventory::Devices(vec![(facts(), 80 << 30)]), 1);
    assert_eq!((check.status, check.cure), (Status::Ok, None));
    assert!(check.detail.contains("CUDA 12.8, 1 GPU(s)"), "{}", check.detail);
    let detail = device(&facts(), 80 << 30).detail;
    for word in ["0: Invented GPU", "80 GiB", "3 copy engine(s)"] {
        assert!(detail.contains(word), "{detail}");
    }
}

#[test]
fn memory_that_cannot_be_kept_registered_comes_with_a_cure() {
    assert_eq!(registered("1", Ok(())).status, Status::Ok);
    assert_eq!(registered("", Err(userfault::Denied::Forbidden)).status, Status::Ok);
    assert_eq!(registered("yes", Ok(())).status, Status::Warn);
    let check = registered("1", Err(userfault::Denied::Forbidden));
    assert_eq!(check.status, Status::Warn);
    assert!(check.cure.unwrap().contains("userfaultfd"));
}

#[test]
fn a_copy_there_and_back_is_compared() {
    let limits = PinLimits { most_bytes: 64 << 20, most_entries: 64 };
    let gpu = CudaEngine::with_driver(ModelDevice::new(), Rates::default(), limits).unwrap();
    let gpu = Arc::new(gpu);
    let builder = Ferry::builder().profile(ProfileSource::BuiltIn);
    let ferry = builder.engine(gpu.clone(), 2).build().unwrap();
    there_and_back(&ferry, &gpu).unwrap();
    let check = a_copy(0, Ok(*gpu.rates()));
    assert_eq!(check.status, Status::Ok);
    assert!(check.detail.contains("50 GB/s in"), "{}", check.detail);
}

#[test]
fn a_gpu_that_cannot_be_opened_is_reported_with_its_reason() {
    let check = a_copy(4000, try_copy(4000));
    assert_eq!(check.status, Status::Missing);
    assert!(check.detail.starts_with("4000: ") && check.cure.is_some(), "{check:?}");
}

#[test]
fn the_variable_is_explained_whatever_it_holds() {
    for (value, count, status) in [
        (None, 0, Status::Ok),
        (Some("off"), 1, Status::Ok),
        (Some("auto"), 0, Status::Ok),
        (Some("auto"), 2, Status::Ok),
        (Some("1"), 2, Status::Ok),
        (Some("2"), 2, Status::Warn),
        (Some("0"), 0, Status::Warn),
        (Some("fast"), 1, Status::Warn),
    ] {
        let check = setting(value, count);
        assert_eq!(check.status, status, "{value:?} with {count}");
        assert_eq!(check.cure.is_some(), status == Status::Warn, "{value:?} with {count}");
    }
}
