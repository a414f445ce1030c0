try {
  const chosen = localStorage.getItem("mcore-convert-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* a page without storage follows the system */ }
